//! The idle policy: who has had no request for long enough is put to rest.

use std::sync::Arc;

use ate_actor::Intent;
use ate_orders::WorkerReport;

use crate::Control;
use crate::actors::is_golden;

impl Control {
    /// Looks at every actor in a worker; begins to put those to rest whose time has come.
    pub fn apply_idle_policy(self: &Arc<Self>, reports: &[WorkerReport]) {
        for hosted in reports.iter().filter_map(|report| report.hosted.as_ref()) {
            if is_golden(&hosted.identity.key) {
                continue;
            }
            let template = self.catalog.template(&hosted.identity.template);
            let after = template.and_then(|template| template.object.spec.idle?.suspend_after);
            if after.is_some_and(|after| hosted.idle >= after.get()) {
                self.begin_save(&hosted.identity.key, Intent::Idle, "idle");
            }
        }
    }
}
