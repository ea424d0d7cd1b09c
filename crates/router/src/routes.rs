//! Where every running actor is, as far as this router has heard: fed by the watch, corrected by workers' verdicts.
//!
//! Readers take no lock. Whatever order news arrive in, an older generation of an actor never replaces a newer one.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use ate_name::ActorKey;
use papaya::HashMap;
use tokio::time::Instant;

use crate::assignment::{Assignment, Update};
use crate::upstream::{Pool, Route, lock};

/// Where an assignment was heard of.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    Watch,
    /// Asked for just now, after a worker's verdict if there was one: it may reinstate a route given up.
    Activation,
}

pub(crate) struct Routes {
    pool: Arc<Pool>,
    routes: HashMap<ActorKey, Arc<Route>>,
    /// Held while writing: a generation is compared and replaced in one step.
    writing: Mutex<()>,
}

impl Routes {
    pub(crate) fn new(pool: Arc<Pool>) -> Self {
        Self { pool, routes: HashMap::new(), writing: Mutex::default() }
    }

    /// The last route heard of, which may have been retired since.
    pub(crate) fn get(&self, key: &ActorKey) -> Option<Arc<Route>> {
        self.routes.pin().get(key).cloned()
    }

    pub(crate) fn apply(&self, update: Update) {
        match update {
            Update::Assigned(assignment) => drop(self.learn(assignment, Source::Watch)),
            Update::Released { key, uid, generation } => {
                let _writing = lock(&self.writing);
                let routes = self.routes.pin();
                let released = |route: &Assignment| route.uid == uid && route.generation <= generation;
                if let Some(route) = routes.get(&key).filter(|route| released(&route.assignment)) {
                    route.retire();
                    routes.remove(&key);
                }
            }
            Update::Reset(assignments) => {
                let listed: std::collections::HashSet<_> = assignments.iter().map(|a| a.key.clone()).collect();
                for assignment in assignments {
                    self.learn(assignment, Source::Watch);
                }
                let _writing = lock(&self.writing);
                self.routes.pin().retain(|key, route| {
                    let kept = listed.contains(key);
                    if !kept {
                        route.retire();
                    }
                    kept
                });
            }
        }
    }

    /// Takes an assignment in, unless a newer one is known, and tells which one holds now.
    pub(crate) fn learn(&self, assignment: Assignment, source: Source) -> Arc<Route> {
        let _writing = lock(&self.writing);
        let routes = self.routes.pin();
        if let Some(current) = routes.get(&assignment.key) {
            // Generations of two actors that bore the same name cannot be compared; the last news wins, and a worker
            // will say so if they were old.
            let same = current.assignment.uid == assignment.uid;
            let (known, heard) = (current.assignment.generation, assignment.generation);
            let reinstated = known == heard && source == Source::Activation && !current.is_live();
            if same && heard <= known && !reinstated {
                return current.clone();
            }
            current.retire();
        }
        let route = Arc::new(Route::new(assignment, self.pool.clone()));
        routes.insert(route.assignment.key.clone(), route.clone());
        route
    }

    /// Closes connections to workers that have not been used for a while, and the least recently used when there are
    /// too many. Forgets routes that were given up. Never returns.
    pub(crate) async fn tend(&self) {
        let idle_timeout = self.pool.config.worker_idle_timeout;
        let mut ticks = tokio::time::interval((idle_timeout / 2).max(Duration::from_millis(1)));
        loop {
            let since = tokio::select! {
                () = self.pool.crowded.notified() => self.median_idle(),
                _ = ticks.tick() => {
                    // Until now they kept late news of the same generation from being believed.
                    let _writing = lock(&self.writing);
                    self.routes.pin().retain(|_, route| route.is_live());
                    Instant::now().checked_sub(idle_timeout)
                }
            };
            if let Some(since) = since {
                self.routes.pin().values().for_each(|route| route.close_idle(since));
            }
        }
    }

    /// Half go at once, so that making room costs little per connection that needs it.
    fn median_idle(&self) -> Option<Instant> {
        let mut idle: Vec<_> = self.routes.pin().values().flat_map(|route| route.idle_since()).collect();
        let middle = idle.len() / 2;
        (!idle.is_empty()).then(|| *idle.select_nth_unstable(middle).1)
    }

    pub(crate) fn clear(&self) {
        self.apply(Update::Reset(Vec::new()));
    }
}
