//! Somebody who makes actors, has them sleep, pauses them, forks them, restarts the copies and deletes all of it, while there
//! are faults. Every call is repeated under the same name until it is acknowledged.
//!
//! ```text
//!   create ─▶ count ─▶ suspend ─▶ peek ─▶ pause ─▶ fork ────────────────▶ delete    now and then both stay until the end
//!                                  │        still     still ─▶ restart ─▶ delete
//!                                  └─ what it has: nobody else asks it anything, and to peek counts nothing
//! ```
//!
//! So what one has after an acknowledged suspend it has from then on, whatever becomes of it, and its copy has it, too.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use ate_proto::ate::v1::{ForkActorRequest, RestartActorRequest};
use ate_proto::ateapi::{
    ActorRef, CreateActorRequest, DeleteActorRequest, GetActorRequest, ListActorsRequest, PauseActorRequest,
};
use ate_testkit::{Client, Reply};
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status};

use crate::ATESPACE;
use crate::traffic::{ANSWER_WITHIN, Traffic};
use crate::verdict::WITHIN;

/// Of so many lives the actors of one stay until the end.
const ONE_STAYS_OF: usize = 3;

const AGAIN: Duration = Duration::from_millis(200);

/// What an actor has.
#[derive(Clone, Debug)]
struct Kept {
    count: i64,
    /// Of its memory, unless that was begun anew: then only its files have the count.
    nonce: Option<String>,
}

#[derive(Debug)]
pub(crate) struct Churn {
    traffic: Arc<Traffic>,
    /// Those that were acknowledged and not deleted.
    there: Mutex<BTreeMap<String, Kept>>,
    deleted: AtomicUsize,
}

impl Churn {
    pub(crate) fn new(traffic: Arc<Traffic>) -> Self {
        Self { traffic, there: Mutex::default(), deleted: AtomicUsize::new(0) }
    }

    pub(crate) fn deleted(&self) -> usize {
        self.deleted.load(Ordering::Relaxed)
    }

    /// One life after the other until it is told to stop, the last to its end.
    pub(crate) async fn run(self: Arc<Self>, stop: CancellationToken) -> anyhow::Result<()> {
        for number in 0.. {
            let (name, copy) = (format!("d{number}"), format!("f{number}"));
            let stays = number % ONE_STAYS_OF == 1;
            self.life(&name, &copy, stays).await.with_context(|| format!("of {name} and its copy {copy}"))?;
            if stop.is_cancelled() {
                break;
            }
        }
        Ok(())
    }

    async fn life(&self, name: &str, copy: &str, stays: bool) -> anyhow::Result<()> {
        let made = self.acknowledged(Call::Create(name)).await?;
        self.answered(name, true).await?;
        self.acknowledged(Call::Suspend(name)).await?;
        let peeked = self.answered(name, false).await?;
        let mut has = Kept { count: peeked.file, nonce: Some(peeked.nonce) };
        self.still(name, &has).await?;
        // Acknowledged or not: it costs nothing.
        if let Some(client) = self.traffic.client().await {
            let _ = tokio::time::timeout(ANSWER_WITHIN, Call::Pause(name).ask(&client)).await;
        }
        self.still(name, &has).await?;
        let forked = self.acknowledged(Call::Fork(name, copy)).await?;
        self.still(copy, &has).await?;
        self.still(name, &has).await?;
        self.end(name, made && !stays, has.clone()).await?;
        self.acknowledged(Call::Restart(copy)).await?;
        has.nonce = None;
        self.still(copy, &has).await?;
        self.end(copy, forked && !stays, has).await
    }

    /// Deletes an actor, or leaves it until all is over. That must be if it was asked for more than once: what was not answered
    /// may still be carried out, and would make it again.
    async fn end(&self, actor: &str, at_once: bool, has: Kept) -> anyhow::Result<()> {
        if at_once {
            return self.delete(actor).await;
        }
        self.there.lock().insert(actor.to_owned(), has);
        Ok(())
    }

    async fn delete(&self, actor: &str) -> anyhow::Result<()> {
        self.acknowledged(Call::Delete(actor)).await?;
        self.deleted.fetch_add(1, Ordering::Relaxed);
        self.acknowledged(Call::Miss(actor)).await.map(drop)
    }

    /// That an actor has what it had.
    async fn still(&self, actor: &str, had: &Kept) -> anyhow::Result<()> {
        let has = self.answered(actor, false).await?;
        let remembers = match &had.nonce {
            Some(nonce) => has.memory == had.count && has.nonce == *nonce,
            None => has.memory == 0,
        };
        ensure!(remembers && has.file == had.count, "{actor} is to have {had:?}, and has {has:?}");
        Ok(())
    }

    /// In the end, when nothing is under way: those are there that must be, with what they had, and nobody else. Then they go, too.
    pub(crate) async fn judge(&self, client: &Client) -> anyhow::Result<()> {
        let there = std::mem::take(&mut *self.there.lock());
        let request = ListActorsRequest { atespace: ATESPACE.to_owned(), ..Default::default() };
        let listed = client.control().list_actors(request).await?.into_inner().actors;
        let listed: BTreeSet<String> = listed.into_iter().map(|actor| actor.actor_id).collect();
        let expected: BTreeSet<String> = crate::actors().chain(there.keys().cloned()).collect();
        ensure!(listed == expected, "there are {listed:?}, and should be {expected:?}");
        for (actor, had) in there {
            self.still(&actor, &had).await?;
            self.delete(&actor).await?;
        }
        Ok(())
    }

    /// Asks until there is an answer.
    async fn answered(&self, actor: &str, counting: bool) -> anyhow::Result<Reply> {
        let begun = Instant::now();
        loop {
            let reply = match counting {
                true => self.traffic.count(actor).await,
                false => self.traffic.peek(actor).await,
            };
            if let Some(reply) = reply {
                return Ok(reply);
            }
            ensure!(begun.elapsed() < WITHIN, "{actor} is there, and does not answer");
            tokio::time::sleep(AGAIN).await;
        }
    }

    /// Repeats a call until it is acknowledged. Whether the first was.
    async fn acknowledged(&self, call: Call<'_>) -> anyhow::Result<bool> {
        let (begun, mut repeated) = (Instant::now(), false);
        loop {
            let asked = async {
                match self.traffic.client().await {
                    Some(client) => call.ask(&client).await,
                    None => Err(Status::unavailable("the replica is not there")),
                }
            };
            let error = match tokio::time::timeout(ANSWER_WITHIN, asked).await {
                Ok(Ok(())) => return Ok(!repeated),
                // One before was carried out, and not heard of.
                Ok(Err(error)) if repeated && call.is_over(error.code()) => return Ok(false),
                Ok(Err(error)) if matches!(error.code(), Code::NotFound | Code::AlreadyExists) => {
                    bail!("{call:?}: {error}");
                }
                Ok(Err(error)) => error,
                Err(_) => Status::deadline_exceeded("no answer"),
            };
            ensure!(begun.elapsed() < WITHIN, "{call:?} is never acknowledged: {error}");
            repeated = true;
            tokio::time::sleep(AGAIN).await;
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Call<'a> {
    Create(&'a str),
    Suspend(&'a str),
    Pause(&'a str),
    Fork(&'a str, &'a str),
    Restart(&'a str),
    Delete(&'a str),
    /// That it is not there.
    Miss(&'a str),
}

impl Call<'_> {
    async fn ask(self, client: &Client) -> Result<(), Status> {
        let (mut control, mut substrate) = (client.control(), client.substrate());
        let reference = |name: &str| Some(ActorRef { atespace: ATESPACE.to_owned(), name: name.to_owned() });
        let atespace = ATESPACE.to_owned();
        match self {
            Self::Create(name) => {
                let request = CreateActorRequest {
                    actor_ref: reference(name),
                    actor_template_namespace: "demo".to_owned(),
                    actor_template_name: "counter".to_owned(),
                    worker_selector: None,
                };
                control.create_actor(request).await.map(drop)
            }
            Self::Suspend(name) => client.try_suspend(ATESPACE, name).await,
            Self::Pause(name) => control.pause_actor(PauseActorRequest { actor_ref: reference(name) }).await.map(drop),
            Self::Fork(from, to) => {
                let request = ForkActorRequest { atespace, from: from.to_owned(), to: to.to_owned() };
                substrate.fork_actor(request).await.map(drop)
            }
            Self::Restart(name) => {
                let request = RestartActorRequest { atespace, name: name.to_owned(), force: false };
                substrate.restart_actor(request).await.map(drop)
            }
            Self::Delete(name) => {
                client.try_suspend(ATESPACE, name).await?;
                control.delete_actor(DeleteActorRequest { actor_ref: reference(name) }).await.map(drop)
            }
            Self::Miss(name) => match control.get_actor(GetActorRequest { actor_ref: reference(name) }).await {
                Ok(_) => Err(Status::already_exists("it was deleted, and is there")),
                Err(error) if error.code() == Code::NotFound => Ok(()),
                Err(error) => Err(error),
            },
        }
    }

    /// Whether this is the answer to one whose like was carried out before.
    fn is_over(self, code: Code) -> bool {
        match self {
            Self::Create(_) | Self::Fork(..) => code == Code::AlreadyExists,
            Self::Delete(_) => code == Code::NotFound,
            Self::Suspend(_) | Self::Pause(_) | Self::Restart(_) | Self::Miss(_) => false,
        }
    }
}
