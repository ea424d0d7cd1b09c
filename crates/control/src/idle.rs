//! The idle policy: who has had no request for long enough is put to rest.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use ate_actor::Intent;
use ate_name::ActorKey;
use ate_orders::WorkerReport;
use tokio::time::Instant;

use crate::Control;
use crate::actors::is_golden;

/// After a save that failed the actor is left alone for a while; doubles with each, up to the last.
const SPARED_FIRST: Duration = Duration::from_secs(1);
const SPARED_LAST: Duration = Duration::from_secs(300);

/// Actors remembered; one that is forgotten is only tried again a little sooner.
const REMEMBERED: usize = 10_000;

/// Actors that could not be put to rest, and until when they are not asked again.
#[derive(Debug, Default)]
pub(crate) struct Unwilling(BTreeMap<ActorKey, (Instant, Duration)>);

impl Unwilling {
    pub(crate) fn note(&mut self, key: &ActorKey, now: Instant) {
        if self.0.len() >= REMEMBERED {
            self.0.retain(|_, (until, _)| *until > now);
        }
        if self.0.len() >= REMEMBERED {
            self.0.clear();
        }
        let spared = self.0.get(key).map_or(SPARED_FIRST, |(_, spared)| (*spared * 2).min(SPARED_LAST));
        self.0.insert(key.clone(), (now + spared, spared));
    }

    pub(crate) fn forget(&mut self, key: &ActorKey) {
        self.0.remove(key);
    }

    pub(crate) fn spares(&self, key: &ActorKey, now: Instant) -> bool {
        self.0.get(key).is_some_and(|(until, _)| now < *until)
    }
}

impl Control {
    /// Looks at every actor in a worker; begins to put those to rest whose time has come.
    pub fn apply_idle_policy(self: &Arc<Self>, reports: &[WorkerReport]) {
        let now = tokio::time::Instant::now();
        for hosted in reports.iter().filter_map(|report| report.hosted.as_ref()) {
            if is_golden(&hosted.identity.key) {
                continue;
            }
            let template = self.catalog.template(&hosted.identity.template);
            let after = template.and_then(|template| template.object.spec.idle().suspend_after);
            let key = &hosted.identity.key;
            if after.is_some_and(|after| hosted.idle >= after.get()) && !self.unwilling.lock().spares(key, now) {
                self.begin_save(&hosted.identity.key, Intent::Idle, "idle");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_cannot_be_saved_is_asked_ever_more_rarely() {
        let (mut unwilling, key) = (Unwilling::default(), ActorKey::parse("space", "a").unwrap());
        let mut now = Instant::now();
        let mut waits = Vec::new();
        for _ in 0..12 {
            unwilling.note(&key, now);
            let begun = now;
            while unwilling.spares(&key, now) {
                now += Duration::from_millis(500);
            }
            waits.push((now - begun).as_secs());
        }
        assert_eq!(waits[..4], [1, 2, 4, 8]);
        assert_eq!(waits.last(), Some(&300));
        unwilling.note(&key, now);
        unwilling.forget(&key);
        assert!(!unwilling.spares(&key, now));
    }
}
