use crate::{Change, CommitError, Committed, Event, Fault, Mutation, Revision, View, judge};

/// What a committer is told.
pub type Verdict = Result<Committed, CommitError>;

/// The state that a group is carried out on: what is stored, and on top of it what the group has done so far.
pub trait Stage: View {
    fn apply(&mut self, mutation: &Mutation) -> Result<(), Fault>;
}

/// What a group of changes comes to. The adapter makes it durable as a whole before it tells anyone, because even a
/// conflict may rest on another change of the group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Where the group leaves the store; where it began if no change of it wrote.
    pub revision: Revision,
    /// One for each change, in their order.
    pub verdicts: Vec<Verdict>,
    pub events: Vec<Event>,
}

impl Group {
    /// Judges each change against the state that those before it leave. One that is refused leaves no trace, and its
    /// neighbours are judged as if it had never been there.
    pub fn judge<'a>(
        stage: &mut dyn Stage,
        changes: impl IntoIterator<Item = &'a Change>,
        start: Revision,
    ) -> Result<Self, Fault> {
        let mut group = Self { revision: start, verdicts: Vec::new(), events: Vec::new() };
        for change in changes {
            let revision = if change.writes.is_empty() { group.revision } else { group.revision.next() };
            let (versions, mutations) = match judge(stage, change, revision) {
                Ok(judged) => judged,
                Err(refused) => {
                    group.verdicts.push(Err(refused));
                    continue;
                }
            };
            for mutation in &mutations {
                stage.apply(mutation)?;
            }
            group.revision = revision;
            group.verdicts.push(Ok(Committed { revision, versions }));
            if !mutations.is_empty() {
                group.events.push(Event { revision, mutations });
            }
        }
        Ok(group)
    }
}
