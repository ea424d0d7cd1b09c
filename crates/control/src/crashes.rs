//! An actor that ends again and again by itself is woken ever more rarely.

use ate_actor::Actor;

use crate::{Code, Control, ControlError};

impl Control {
    /// Refuses to wake an actor that has crashed too often to be tried again already.
    pub(crate) fn check_crashes(&self, actor: &Actor) -> Result<(), ControlError> {
        let Some(crashes) = &actor.crashes else { return Ok(()) };
        let left = crashes.pause_left(self.world.now());
        if left.is_zero() {
            return Ok(());
        }
        let text = format!(
            "Actor {name} has crashed {count} times in a row, last: {reason}; it is tried again in {seconds} s\n  \
             see what it printed: ate logs {name} -a {atespace}",
            name = actor.key.name,
            atespace = actor.key.atespace,
            count = crashes.count,
            reason = crashes.reason,
            seconds = left.as_millis().div_ceil(1000),
        );
        Err(ControlError::new(Code::Unavailable, text).after(left))
    }
}
