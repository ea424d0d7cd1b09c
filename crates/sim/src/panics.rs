//! A task that panics ends nobody but itself, and whoever waits for it is told something else. So panics are heard here: a run
//! has one thread, and what panics on it is the run's.

use std::cell::RefCell;
use std::sync::Once;

thread_local! {
    static HEARD: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

/// Listens on every thread from now on, and forgets what was heard on this one.
pub(crate) fn listen() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            HEARD.with(|heard| heard.borrow_mut().push(panic.to_string()));
            usual(panic);
        }));
    });
    heard();
}

/// What was heard on this thread since it was last asked for.
pub(crate) fn heard() -> Vec<String> {
    HEARD.with(RefCell::take)
}
