//! What people have done by force, for those who come later: written in the transaction that does it, and never removed.

use ate_actor::Actor;
use ate_name::{ActorKey, ActorUid, OpId};
use ate_store::{Change, Key, Kind, Prefix};
use serde::{Deserialize, Serialize};

use crate::records::{Read, encode};
use crate::{Control, ControlError, MAX_PAGE};

/// Longest reason, in characters: a line, not a report. A longer one is refused.
const MAX_REASON: usize = 1024;

const AUDIT: &str = "audit";

/// Who asks for something that is written down for good, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    caller: String,
    reason: String,
}

impl Asked {
    pub fn by(caller: impl Into<String>, reason: impl Into<String>) -> Result<Self, ControlError> {
        let (caller, reason) = (caller.into(), reason.into());
        if reason.chars().count() > MAX_REASON || reason.contains(char::is_control) {
            return Err(ControlError::invalid(format!("a reason is one line of at most {MAX_REASON} characters")));
        }
        Ok(Self { caller, reason })
    }

    /// For a history: who it was, and what they said.
    pub(crate) fn words(&self) -> String {
        match self.reason.as_str() {
            "" => format!("asked by {}", self.caller),
            reason => format!("asked by {}: {reason}", self.caller),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AuditEntry {
    pub time: jiff::Timestamp,
    /// The method that was called.
    pub call: String,
    pub actor: ActorKey,
    pub uid: ActorUid,
    pub caller: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// What was found, and done.
    pub detail: String,
}

/// Sorts by time; two of one moment differ in their last part.
fn audit_key(time: jiff::Timestamp, op: OpId) -> Key {
    Key::new(Kind::Meta, [AUDIT, &format!("{time:.6}-{op}")]).expect("a time and a uid are a segment")
}

impl Control {
    /// Adds the record of what a change does to it. Tell it with [`AuditEntry::tell`] once the change is made.
    pub(crate) fn with_audit(
        &self,
        change: Change,
        call: &'static str,
        actor: &Actor,
        asked: &Asked,
        detail: String,
    ) -> (Change, AuditEntry) {
        let entry = AuditEntry {
            time: self.world.now(),
            call: call.to_owned(),
            actor: actor.key.clone(),
            uid: actor.uid,
            caller: asked.caller.clone(),
            reason: asked.reason.clone(),
            detail,
        };
        let key = audit_key(entry.time, OpId::from_random(self.world.random()));
        (change.put(key, encode(&entry)), entry)
    }

    /// A page of what was done by force, oldest first, after the token of the page before.
    pub async fn list_audit(
        &self,
        after: Option<&str>,
        limit: usize,
    ) -> Result<(Vec<AuditEntry>, Option<String>), ControlError> {
        let prefix = Prefix::below(Kind::Meta, [AUDIT]).expect("a constant is a segment");
        let page = self.store.list(&prefix, after, limit.clamp(1, MAX_PAGE)).await?;
        let token = page.records.last().filter(|_| page.more).map(|record| record.key.path().to_owned());
        let entries = page.records.into_iter().map(|record| Ok(Read::<AuditEntry>::decode(record)?.value));
        Ok((entries.collect::<Result<_, ControlError>>()?, token))
    }
}

impl AuditEntry {
    /// For whoever collects the server's log.
    pub(crate) fn tell(&self) {
        let Self { call, actor, uid, caller, reason, detail, .. } = self;
        tracing::warn!(target: "audit", call, %actor, %uid, caller, reason, detail);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_is_one_line_of_bounded_length() {
        assert!(Asked::by("cli", "it hangs since the upgrade").is_ok());
        for reason in ["two\nlines", "\u{1b}[31m", &"x".repeat(MAX_REASON + 1)] {
            let refused = Asked::by("cli", reason).expect_err(reason);
            assert_eq!(refused.code, crate::Code::InvalidArgument);
        }
    }

    #[test]
    fn entries_sort_by_their_time() {
        let (early, late) = (OpId::from_random([9; 16]), OpId::from_random([1; 16]));
        let at = |seconds, nanos| jiff::Timestamp::new(seconds, nanos).expect("a date");
        for (before, after) in
            [(at(0, 0), at(0, 1_000_000)), (at(9, 900_000_000), at(10, 0)), (at(1, 0), at(1 << 31, 0))]
        {
            assert!(audit_key(before, early) < audit_key(after, late), "{before} {after}");
        }
    }
}
