use proptest::prelude::*;

use super::*;

fn answered(begun: u64, ended: u64, generation: u64, nonce: u64, count: u64) -> Seen {
    Seen { actor: "a".into(), begun, ended, what: What::Answered { generation, launch: generation, nonce, count } }
}

fn suspended(begun: u64, ended: u64, generation: u64) -> Seen {
    Seen { actor: "a".into(), begun, ended, what: What::Suspended { generation } }
}

fn unanswered(begun: u64, ended: u64) -> Seen {
    Seen { actor: "a".into(), begun, ended, what: What::Unanswered }
}

fn rule(seen: &[Seen]) -> Option<Rule> {
    examine(seen).err().map(|contradiction| contradiction.rule)
}

#[test]
fn a_life_with_a_suspend_and_a_fall_back_is_explained() {
    let seen = [
        answered(0, 10, 1, 5, 1),
        answered(1, 9, 1, 5, 2),
        suspended(11, 20, 1),
        answered(21, 30, 2, 5, 3),
        // Generation 2 was lost with its worker: 3 is gone, and nobody was promised otherwise.
        answered(31, 40, 3, 5, 3),
        unanswered(41, 50),
        answered(51, 60, 3, 5, 5),
    ];
    let examined = examine(&seen).unwrap();
    assert_eq!(examined, Examined { actors: 1, answers: 5, unanswered: 1, suspends: 1, generations: 3 });
}

#[test]
fn what_an_acknowledged_suspend_had_may_not_be_gone() {
    let lost = [answered(0, 1, 1, 5, 1), answered(2, 3, 1, 5, 2), suspended(4, 5, 1), answered(6, 7, 2, 5, 2)];
    assert_eq!(rule(&lost), Some(Rule::NothingLost));
    // Counted while the suspend was under way: it may have come too late for it.
    let late = [answered(0, 1, 1, 5, 1), answered(2, 5, 1, 5, 2), suspended(4, 6, 1), answered(7, 8, 2, 5, 2)];
    assert_eq!(rule(&late), None);
}

#[test]
fn an_older_generation_may_not_answer_after_a_newer_one() {
    assert_eq!(rule(&[answered(0, 1, 2, 5, 1), answered(2, 3, 1, 5, 2)]), Some(Rule::OneAtATime));
    // Its answer may be late, if it was asked before.
    assert_eq!(rule(&[answered(0, 4, 1, 5, 1), answered(1, 3, 2, 5, 1)]), None);
}

#[test]
fn two_sandboxes_of_one_generation_are_found_out() {
    assert_eq!(rule(&[answered(0, 1, 1, 5, 1), answered(2, 3, 1, 6, 2)]), Some(Rule::OneMemory));
    assert_eq!(rule(&[answered(0, 1, 1, 5, 1), answered(2, 3, 1, 5, 1)]), Some(Rule::CountedOnce));
    assert_eq!(rule(&[answered(0, 1, 1, 5, 2), answered(2, 3, 1, 5, 1)]), Some(Rule::InOrder));
}

#[test]
fn a_count_comes_from_a_request() {
    assert_eq!(rule(&[answered(0, 1, 1, 5, 2)]), Some(Rule::NothingInvented));
    assert_eq!(rule(&[unanswered(0, 9), answered(0, 1, 1, 5, 2)]), None);
}

#[test]
fn a_generation_that_was_suspended_is_over() {
    let after = [answered(0, 1, 7, 5, 1), suspended(2, 3, 7), answered(4, 5, 7, 5, 2), answered(6, 7, 8, 5, 3)];
    assert_eq!(rule(&after), Some(Rule::OverWhenSuspended));
    let during = [answered(0, 1, 7, 5, 1), answered(3, 5, 7, 5, 2), suspended(2, 4, 7), answered(6, 7, 8, 5, 3)];
    assert_eq!(rule(&during), None);
}

#[test]
fn a_loss_hides_no_request_that_is_counted_twice() {
    let lost: Vec<_> = (1..=10).map(|count| answered(2 * count, 2 * count + 1, 1, 5, count)).collect();
    let twice = [answered(30, 31, 2, 6, 1), answered(32, 33, 2, 6, 3)];
    assert_eq!(rule(&[&lost[..], &twice[..]].concat()), Some(Rule::NothingInvented));
    let unheard = [answered(30, 31, 2, 6, 1), unanswered(30, 32), answered(32, 33, 2, 6, 3)];
    assert_eq!(rule(&[&lost[..], &unheard[..]].concat()), None);
}

#[test]
fn what_was_lost_does_not_come_back_after_a_suspend() {
    let lost: Vec<_> = (1..=50).map(|count| answered(2 * count, 2 * count + 1, 5, 5, count)).collect();
    let suspend = [answered(200, 201, 6, 5, 11), suspended(202, 203, 6)];
    let back = [&lost[..], &suspend[..], &[answered(204, 205, 7, 5, 51)]].concat();
    assert_eq!(rule(&back), Some(Rule::NothingInvented));
    let right = [&lost[..], &suspend[..], &[answered(204, 205, 7, 5, 12)]].concat();
    assert_eq!(rule(&right), None);
}

fn line(generation: u64, event: &str, detail: &str, since: bool) -> Line {
    Line { generation, told: Told::read(event, detail), since }
}

#[test]
fn a_suspend_that_lost_what_it_was_to_save_covers_it_all_the_same() {
    let before =
        [line(4, "Suspending", "asked for", false), line(4, "Suspended", "", false), line(5, "Running", "", false)];
    let told = |rest: &[Line]| [&before[..], rest].concat();
    let own = told(&[line(5, "Suspending", "asked for", true), line(5, "Lost", "", true)]);
    assert!(covers(5, &own, true), "it was lost by the save that is acknowledged");
    assert!(!covers(5, &own, false), "or by somebody else's, and was at rest when this one came");
    let stored = told(&[line(5, "Suspending", "asked for", true), line(5, "FellBack", "", true)]);
    assert!(covers(5, &stored, true), "stored, and gone before it was durable");
    for lost in ["Lost", "Crashed", "Unstuck", "FellBack", "ResumeFailed"] {
        assert!(!covers(5, &told(&[line(5, lost, "", true)]), true), "{lost} before it could be saved");
    }
    let idle = told(&[line(5, "Suspending", "idle", true), line(5, "Lost", "", true)]);
    assert!(!covers(5, &idle, true), "a save of the system's own");
    let later = told(&[
        line(5, "Suspending", "asked for", true),
        line(5, "Suspended", "", true),
        line(5, "Durable", "", true),
        line(6, "Running", "", true),
        line(6, "Lost", "", true),
    ]);
    assert!(!covers(5, &later, true), "what it is good for is not known any more");
    assert!(covers(5, &later[..6], true));
    assert!(!covers(5, &[line(6, "Lost", "", true)], true), "nobody knows how it began");

    // So what such a system lets clients see is refused.
    let seen = |generation| {
        [
            answered(0, 1, 4, 7, 1),
            suspended(2, 3, 4),
            answered(4, 5, 5, 7, 2),
            suspended(6, 7, generation),
            answered(8, 9, 6, 7, 2),
        ]
    };
    assert_eq!(rule(&seen(5)), Some(Rule::NothingLost));
    assert_eq!(rule(&seen(4)), None);
}

#[test]
fn those_who_ask_are_alone_if_nothing_of_others_can_begin_meanwhile() {
    let mut asks = Asks::default();
    let first = asks.begin("a", 1);
    let other = asks.begin("b", 1);
    assert!(asks.is_alone(&first, 5) && asks.is_alone(&other, 5));
    let second = asks.begin("a", 6);
    assert!(asks.is_alone(&first, 5) && !asks.is_alone(&first, 6) && !asks.is_alone(&second, 9));
    asks.over(&first, 5);
    assert!(asks.is_alone(&second, 9));
}

#[test]
fn memory_survives_an_acknowledged_suspend_unless_somebody_restarts_it() {
    let restarted = |begun, ended, done| Seen { actor: "a".into(), begun, ended, what: What::Restarted { done } };
    let before = [answered(10, 11, 1, 7, 1), suspended(12, 13, 1)];
    let anew = |restart: Option<Seen>| {
        let after = [answered(20, 21, 2, 8, 2)];
        rule(&before.iter().cloned().chain(restart).chain(after).collect::<Vec<_>>())
    };
    assert_eq!(anew(None), Some(Rule::MemoryKept));
    assert_eq!(anew(Some(restarted(14, 15, true))), None);
    assert_eq!(anew(Some(restarted(0, 5, false))), None, "the wish may still stand");
    assert_eq!(anew(Some(restarted(0, 5, true))), Some(Rule::MemoryKept), "that one was done before");
    assert_eq!(anew(Some(restarted(22, 23, true))), Some(Rule::MemoryKept), "that one came later");
    // Nothing was promised for what was lost before.
    assert_eq!(rule(&[answered(0, 1, 1, 7, 1), answered(2, 3, 2, 8, 1)]), None);
}

#[test]
fn actors_are_apart() {
    let other = Seen { actor: "b".into(), ..answered(2, 3, 1, 6, 1) };
    assert_eq!(rule(&[answered(0, 1, 1, 5, 1), other]), None);
}

/// What a system that keeps its promises lets clients see: steps are requests, suspends and losses, one after the other,
/// with answers that arrive some time after the step.
fn honest(steps: &[(u8, u64, u64)]) -> Vec<Seen> {
    let (mut count, mut stored, mut generation, mut running) = (0, 0, 0, false);
    let mut seen = Vec::new();
    for (at, &(step, early, late)) in steps.iter().enumerate() {
        let at = 100 * at as u64 + 50;
        let (begun, ended) = (at - early % 50, at + late % 200);
        match step % 8 {
            0 if running => {
                (stored, running) = (count, false);
                seen.push(suspended(at - early % 50, at + late % 50, generation));
            }
            1 if running => (count, running) = (stored, false),
            2 => {
                seen.push(unanswered(begun, ended));
                if running {
                    count += u64::from(late % 2 == 0);
                }
            }
            _ => {
                generation += u64::from(!running);
                running = true;
                count += 1;
                seen.push(answered(begun, ended, generation, 5, count));
            }
        }
    }
    seen
}

proptest! {
    #[test]
    fn an_honest_system_is_never_accused(steps in prop::collection::vec(any::<(u8, u64, u64)>(), 0..60)) {
        prop_assert_eq!(examine(&honest(&steps)).map(drop), Ok(()));
    }

    #[test]
    fn a_request_that_is_forgotten_by_a_suspend_is_found(
        steps in prop::collection::vec(any::<(u8, u64, u64)>(), 0..40),
    ) {
        // An answer, a suspend that is acknowledged, and then a wake from what was there before the answer.
        let mut seen = honest(&steps);
        let last = seen.iter().map(|seen| seen.ended).max().unwrap_or(0);
        let (mut generation, mut count) = (0, 0);
        for one in &seen {
            if let What::Answered { generation: g, count: c, .. } = one.what {
                (generation, count) = (generation.max(g), count.max(c));
            }
        }
        seen.push(unanswered(0, last + 9));
        seen.push(answered(last + 1, last + 2, generation + 1, 5, count + 1));
        seen.push(suspended(last + 3, last + 4, generation + 1));
        seen.push(answered(last + 5, last + 6, generation + 2, 5, count + 1));
        prop_assert_eq!(rule(&seen), Some(Rule::NothingLost));
    }
}
