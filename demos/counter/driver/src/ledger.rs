//! What every actor must answer next, remembered across runs, also when a run is killed.
//!
//! Each request is written down before it is sent and each answer when it arrives. So the true count of an actor always
//! lies between what was acknowledged and that plus the requests whose fate is not known:
//!
//! ```text
//!   acknowledged < the next answer <= acknowledged + unsure + 1
//! ```
//!
//! Lines are written without a sync: what a process has written outlives it, whatever kills it. Only a machine that goes down
//! can lose the newest lines; the next run tells by the boot id and then takes the counts as it finds them, out loud.
//!
//! ```text
//!   at counter-1 <uid> 17 0      17 acknowledged, none unsure, as of the start of this run
//!   run <boot id> <unix time>
//!   sent counter-1 1             requests
//!   got counter-1 18             one for each answer
//!   shared                       from here on others may send requests too
//!   end                          everything was stopped in order
//! ```

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::Context;

#[derive(Clone, Debug, PartialEq, Eq)]
struct Account {
    uid: String,
    acknowledged: u64,
    /// Requests that may have counted, or may still.
    unsure: u64,
    first: First,
}

/// What the first answer of a run may be besides the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum First {
    Next,
    /// Higher: others may have sent requests since.
    OrMore,
    /// Anything: nothing is known, for a reason that was told.
    Any,
}

/// How the run before this one ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Before {
    Nothing,
    InOrder,
    /// It was killed, and began at this time (in seconds since 1970).
    Killed(i64),
    /// The whole machine went down under it.
    MachineDown,
}

/// What is wrong with an answer, for people; or nothing.
pub(crate) type Verdict = Result<(), String>;

#[derive(Debug)]
pub(crate) struct Ledger {
    accounts: BTreeMap<String, Account>,
    file: File,
    before: Before,
    was_shared: bool,
}

#[derive(Default)]
struct Replayed {
    accounts: BTreeMap<String, Account>,
    run: Option<(String, i64)>,
    ended: bool,
    shared: bool,
}

impl Ledger {
    /// Reads what there is, shortens it, and begins a run.
    pub(crate) fn open(path: &Path, boot: &str, now: i64) -> anyhow::Result<Self> {
        let text = match fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(error).with_context(|| format!("cannot read {}", path.display())),
        };
        let replayed = replay(&text).with_context(|| format!("{} is not a ledger of this demo", path.display()))?;
        let before = match &replayed.run {
            None => Before::Nothing,
            Some(_) if replayed.ended => Before::InOrder,
            Some((then, begun)) if then == boot => Before::Killed(*begun),
            Some(_) => Before::MachineDown,
        };
        let first = match (&before, replayed.shared) {
            (Before::MachineDown, _) => First::Any,
            (_, true) => First::OrMore,
            _ => First::Next,
        };
        let mut accounts = replayed.accounts;
        let mut short = String::new();
        for (name, account) in &mut accounts {
            account.first = first;
            let Account { uid, acknowledged, unsure, .. } = account;
            short.push_str(&format!("at {name} {uid} {acknowledged} {unsure}\n"));
        }
        short.push_str(&format!("run {boot} {now}\n"));
        let file = replace(path, &short).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Self { accounts, file, before, was_shared: replayed.shared })
    }

    pub(crate) fn before(&self) -> &Before {
        &self.before
    }

    /// Takes up an actor as the system has it. Says so if the ledger knew another one by this name, which only somebody else
    /// can have deleted.
    pub(crate) fn take_up(&mut self, name: &str, uid: &str, is_new: bool) -> anyhow::Result<Verdict> {
        let known = self.accounts.get(name).map(|account| account.uid.clone());
        if known.as_deref() == Some(uid) {
            return Ok(Ok(()));
        }
        let first = if is_new { First::Next } else { First::Any };
        let account = Account { uid: uid.to_owned(), acknowledged: 0, unsure: 0, first };
        self.accounts.insert(name.to_owned(), account);
        self.write(&format!("at {name} {uid} 0 0"))?;
        let is_excused = known.is_none() || self.was_shared || self.before == Before::MachineDown;
        Ok(if is_excused { Ok(()) } else { Err(format!("{name} was there and is gone: a new one was made")) })
    }

    /// The system says why this actor's count may have fallen: it continues from a snapshot that is older.
    pub(crate) fn excuse(&mut self, name: &str) {
        if let Some(account) = self.accounts.get_mut(name) {
            account.first = First::Any;
        }
    }

    /// To be called before the requests are sent.
    pub(crate) fn sent(&mut self, name: &str, requests: u64) -> anyhow::Result<()> {
        self.write(&format!("sent {name} {requests}"))?;
        if let Some(account) = self.accounts.get_mut(name) {
            account.unsure += requests;
        }
        Ok(())
    }

    /// The counts that those requests were answered with, in any order; as many are missing as got no answer.
    pub(crate) fn answered(&mut self, name: &str, requests: u64, counts: &[u64]) -> anyhow::Result<Verdict> {
        let mut counts = counts.to_vec();
        // Read back one by one, so each must build on the one before.
        counts.sort_unstable();
        for count in &counts {
            self.write(&format!("got {name} {count}"))?;
        }
        let Some(account) = self.accounts.get_mut(name) else { return Ok(Err(format!("{name} is not known"))) };
        let verdict = account.judge(requests, &counts);
        account.settle(&counts);
        Ok(verdict.map_err(|expected| format!("{name} answered {counts:?}, not {expected}")))
    }

    pub(crate) fn acknowledged(&self, name: &str) -> u64 {
        self.accounts.get(name).map_or(0, |account| account.acknowledged)
    }

    pub(crate) fn unsure(&self) -> u64 {
        self.accounts.values().map(|account| account.unsure).sum()
    }

    pub(crate) fn share(&mut self) -> anyhow::Result<()> {
        self.write("shared")
    }

    /// Everything has been stopped in order.
    pub(crate) fn end(&mut self) -> anyhow::Result<()> {
        self.write("end")?;
        self.file.sync_data().context("cannot sync the ledger")
    }

    fn write(&mut self, line: &str) -> anyhow::Result<()> {
        // In one call, so that a line is there or is not.
        self.file.write_all(format!("{line}\n").as_bytes()).context("cannot write the ledger")
    }
}

impl Account {
    /// What was expected, if it is not what came. The requests are among the unsure ones.
    fn judge(&mut self, requests: u64, sorted: &[u64]) -> Result<(), String> {
        let (Some(lowest), Some(highest)) = (sorted.first(), sorted.last()) else { return Ok(()) };
        let first = std::mem::replace(&mut self.first, First::Next);
        let (least, most) = (self.acknowledged + 1, self.acknowledged + self.unsure);
        let is_distinct = sorted.windows(2).all(|pair| pair[0] < pair[1]);
        let is_low = *lowest < least && first != First::Any;
        let is_high = *highest > most && first == First::Next;
        if is_distinct && !is_low && !is_high {
            return Ok(());
        }
        let asked = if requests == 1 { String::new() } else { ", each once".to_owned() };
        Err(if least == most { format!("{least}") } else { format!("{least} to {most}{asked}") })
    }

    fn settle(&mut self, counts: &[u64]) {
        let Some(highest) = counts.iter().copied().max() else { return };
        let answered = u64::try_from(counts.len()).unwrap_or(u64::MAX);
        // Whatever the count has risen beyond the answers was done by requests without an answer.
        let counted = highest.saturating_sub(self.acknowledged).max(answered);
        self.unsure = self.unsure.saturating_sub(counted);
        self.acknowledged = highest;
    }
}

fn replay(text: &str) -> anyhow::Result<Replayed> {
    let mut replayed = Replayed::default();
    // A line without its end was being written when its writer was killed: the request was not sent yet, or its
    // answer counts as one that has not arrived.
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    for (number, line) in whole.lines().enumerate() {
        let words: Vec<&str> = line.split(' ').collect();
        replayed.take(&words).with_context(|| format!("line {}: {line:?}", number + 1))?;
    }
    Ok(replayed)
}

impl Replayed {
    fn take(&mut self, words: &[&str]) -> anyhow::Result<()> {
        match words {
            ["at", name, uid, acknowledged, unsure] => {
                let account = Account {
                    uid: (*uid).to_owned(),
                    acknowledged: acknowledged.parse()?,
                    unsure: unsure.parse()?,
                    first: First::Next,
                };
                self.accounts.insert((*name).to_owned(), account);
            }
            ["run", boot, begun] => self.run = Some(((*boot).to_owned(), begun.parse()?)),
            ["sent", name, requests] => self.account(name)?.unsure += requests.parse::<u64>()?,
            ["got", name, count] => {
                let count = count.parse()?;
                self.account(name)?.settle(&[count]);
            }
            ["shared"] => self.shared = true,
            ["end"] => self.ended = true,
            _ => anyhow::bail!("it says nothing that is known"),
        }
        Ok(())
    }

    fn account(&mut self, name: &str) -> anyhow::Result<&mut Account> {
        self.accounts.get_mut(name).context("no such actor so far")
    }
}

/// Puts a new file in place of the old, whole or not at all, open for appending.
fn replace(path: &Path, text: &str) -> std::io::Result<File> {
    let new = PathBuf::from(format!("{}.new", path.display()));
    fs::write(&new, text)?;
    let file = File::options().append(true).open(&new)?;
    file.sync_data()?;
    fs::rename(&new, path)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    struct Fixture(tempfile::TempDir);

    impl Fixture {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn path(&self) -> PathBuf {
            self.0.path().join("ledger")
        }

        fn open_after(&self, boot: &str) -> Ledger {
            Ledger::open(&self.path(), boot, 1000).unwrap()
        }

        fn open(&self) -> Ledger {
            self.open_after("boot")
        }

        /// A run of one request to one actor, answered with `count`.
        fn run(&self, count: u64, end: impl FnOnce(&mut Ledger)) -> Verdict {
            let mut ledger = self.open();
            ledger.take_up("a", "uid", true).unwrap().unwrap();
            let verdict = ask(&mut ledger, 1, &[count]);
            end(&mut ledger);
            verdict
        }
    }

    fn ask(ledger: &mut Ledger, requests: u64, counts: &[u64]) -> Verdict {
        ledger.sent("a", requests).unwrap();
        ledger.answered("a", requests, counts).unwrap()
    }

    fn in_order(ledger: &mut Ledger) {
        ledger.end().unwrap();
    }

    #[test]
    fn each_answer_is_one_more_than_the_last_also_over_runs() {
        let fixture = Fixture::new();
        assert_eq!(fixture.run(1, in_order), Ok(()));
        assert_eq!(fixture.run(2, in_order), Ok(()));
        for wrong in [2, 1, 4] {
            let fixture = Fixture::new();
            fixture.run(1, in_order).unwrap();
            fixture.run(2, in_order).unwrap();
            assert_eq!(fixture.run(wrong, in_order), Err(format!("a answered [{wrong}], not 3")));
        }
    }

    #[test]
    fn a_request_without_an_answer_may_have_counted_or_may_still() {
        for next in [1, 2] {
            let mut ledger = Fixture::new().open();
            ledger.take_up("a", "uid", true).unwrap().unwrap();
            assert_eq!(ask(&mut ledger, 1, &[]), Ok(()));
            assert_eq!(ledger.unsure(), 1);
            assert_eq!(ask(&mut ledger, 1, &[next]), Ok(()));
            assert_eq!(ledger.unsure(), 2 - next);
            assert!(ask(&mut ledger, 1, &[4]).is_err(), "more than was ever sent");
        }
    }

    #[test]
    fn a_burst_is_answered_with_each_count_once_in_any_order() {
        for (counts, is_right) in
            [(&[3, 1, 2][..], true), (&[1, 2], true), (&[1, 1, 2], false), (&[0, 1, 2], false), (&[2, 3, 4], false)]
        {
            let mut ledger = Fixture::new().open();
            ledger.take_up("a", "uid", true).unwrap().unwrap();
            assert_eq!(ask(&mut ledger, 3, counts).is_ok(), is_right, "{counts:?}");
        }
    }

    #[test]
    fn a_killed_run_is_known_and_what_it_had_sent_is_unsure() {
        let fixture = Fixture::new();
        fixture.run(1, |ledger| ledger.sent("a", 1).unwrap()).unwrap();
        let torn = fs::read_to_string(fixture.path()).unwrap() + "sent a";
        fs::write(fixture.path(), torn).unwrap();
        let mut ledger = fixture.open();
        assert_eq!((ledger.before(), ledger.unsure()), (&Before::Killed(1000), 1));
        assert!(ask(&mut ledger, 1, &[1]).is_err(), "a killed run is no excuse by itself");
        drop(ledger);
        assert_eq!(fixture.open_after("another boot").before(), &Before::MachineDown);
    }

    #[test]
    fn after_the_machine_went_down_counts_are_taken_as_found_once() {
        let fixture = Fixture::new();
        fixture.run(1, |_| {}).unwrap();
        let mut ledger = fixture.open_after("another boot");
        assert_eq!(ask(&mut ledger, 1, &[7]), Ok(()));
        assert!(ask(&mut ledger, 1, &[7]).is_err());
    }

    #[test]
    fn others_may_have_counted_but_not_taken_away() {
        for (count, is_right) in [(2, true), (9, true), (1, false)] {
            let fixture = Fixture::new();
            fixture.run(1, |ledger| ledger.share().and_then(|()| ledger.end()).unwrap()).unwrap();
            assert_eq!(fixture.run(count, in_order).is_ok(), is_right, "{count}");
            // And what they counted is known from then on.
            assert!(fixture.run(count + 2, in_order).is_err());
        }
    }

    #[test]
    fn an_actor_that_is_gone_is_noticed_unless_others_could_delete_it() {
        let fixture = Fixture::new();
        fixture.run(1, in_order).unwrap();
        assert!(fixture.open().take_up("a", "another", true).unwrap().is_err());
        let fixture = Fixture::new();
        fixture.run(1, |ledger| ledger.share().and_then(|()| ledger.end()).unwrap()).unwrap();
        let mut ledger = fixture.open();
        assert_eq!(ledger.take_up("a", "another", true).unwrap(), Ok(()));
        assert_eq!(ask(&mut ledger, 1, &[1]), Ok(()), "the new one begins at nothing");
    }

    #[test]
    fn what_is_no_ledger_is_not_taken_for_one() {
        let fixture = Fixture::new();
        fs::write(fixture.path(), "at a uid 1 0\nhello\n").unwrap();
        let error = format!("{:#}", Ledger::open(&fixture.path(), "boot", 0).unwrap_err());
        assert!(error.contains("line 2"), "{error}");
    }

    proptest! {
        // Each case writes files and syncs them.
        #![proptest_config(ProptestConfig::with_cases(24))]

        /// Whatever is lost on the way, an actor that counts right is never called wrong, in this run or in the next.
        #[test]
        fn an_honest_actor_is_never_accused(units in proptest::collection::vec((1u64..4, any::<[u8; 3]>(), any::<bool>()), 1..30)) {
            let fixture = Fixture::new();
            let mut ledger = fixture.open();
            ledger.take_up("a", "uid", true).unwrap().unwrap();
            let mut truth = 0;
            for (requests, fates, restart) in units {
                let mut counts = Vec::new();
                for fate in &fates[..usize::try_from(requests).unwrap()] {
                    match fate % 4 {
                        0 => {}
                        1 => truth += 1,
                        _ => {
                            truth += 1;
                            counts.push(truth);
                        }
                    }
                }
                prop_assert_eq!(ask(&mut ledger, requests, &counts), Ok(()));
                if restart {
                    drop(ledger);
                    ledger = fixture.open();
                }
            }
        }
    }
}
