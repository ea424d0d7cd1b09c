//! A process is killed while it commits; what it had been told is durable must be there, and nothing by half.
//!
//! The adapter's test starts itself again as the child (see [`kill_while_writing`]); the child opens the store and
//! calls [`write_until_killed`]; the parent opens what is left and calls [`check`].

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::sync::Arc;

use super::{actor, get};
use crate::{Change, Key, Kind, MAX_PAGE_RECORDS, Prefix, Revision, Store};

const WRITERS: usize = 8;

/// The last commit of each writer that the killed process knew to be durable.
pub type Acknowledged = BTreeMap<usize, u64>;

/// Commits until the process dies. Each line on the output is an acknowledgement: writer, number.
pub async fn write_until_killed(store: Arc<dyn Store>) {
    let mut writers = tokio::task::JoinSet::new();
    for writer in 0..WRITERS {
        let store = store.clone();
        writers.spawn(async move {
            let mut number = get(&*store, &format!("left/{writer}")).await.map_or(0, |record| record.version);
            loop {
                number += 1;
                let change = Change::new()
                    .put(actor(&format!("left/{writer}")), number.to_string())
                    .create(log(writer, number), vec![b'x'; 600])
                    .put(actor(&format!("right/{writer}")), number.to_string());
                store.commit(change).await.expect("nobody else writes these");
                writeln!(std::io::stdout(), "ack {writer} {number}").expect("the parent reads");
            }
        });
    }
    writers.join_all().await;
}

fn log(writer: usize, number: u64) -> Key {
    Key::new(Kind::History, [writer.to_string(), format!("{number:08}")]).expect("well formed")
}

/// Runs the child until it has acknowledged that many commits, and kills it with SIGKILL.
pub fn kill_while_writing(child: &mut Command, after: usize) -> Acknowledged {
    let mut child = child.stdout(Stdio::piped()).spawn().expect("the child starts");
    let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    let mut acknowledged = Acknowledged::new();
    let mut count = 0;
    // After the kill, what is in the pipe still counts: it was acknowledged before.
    for line in lines.map_while(Result::ok) {
        let mut words = line.split_whitespace();
        let (Some("ack"), Some(writer), Some(number), None) = (words.next(), words.next(), words.next(), words.next())
        else {
            continue;
        };
        // The kill may cut the last line, but not before its end: a line without a number does not parse.
        let (Ok(writer), Ok(number)) = (writer.parse(), number.parse()) else { continue };
        acknowledged.insert(writer, number);
        count += 1;
        if count == after {
            child.kill().expect("still running: it writes until killed");
        }
    }
    child.wait().expect("killed");
    assert!(count >= after, "the child ended after {count} commits");
    acknowledged
}

/// Each writer's records agree with each other and hold the last acknowledged commit, or the one in flight after it.
pub async fn check(store: &dyn Store, acknowledged: &Acknowledged) {
    let mut commits = 0;
    for writer in 0..WRITERS {
        let known = acknowledged.get(&writer).copied().unwrap_or(0);
        let left = get(store, &format!("left/{writer}")).await;
        let right = get(store, &format!("right/{writer}")).await;
        let side = |record: &Option<crate::Record>| {
            record.as_ref().map_or((0, "0".into()), |record| (record.version, record.value.clone()))
        };
        let (number, value) = side(&left);
        assert!(number == known || number == known + 1, "writer {writer}: {known} acknowledged, {number} there");
        assert_eq!(value, number.to_string(), "writer {writer}");
        assert_eq!(side(&left), side(&right), "writer {writer}: half a commit");
        assert_eq!(logged(store, writer).await, number, "writer {writer}: its log and its counter differ");
        commits += number;
    }
    assert_eq!(store.revision().await, Ok(Revision(commits)), "revisions count commits");
}

async fn logged(store: &dyn Store, writer: usize) -> u64 {
    let prefix = Prefix::below(Kind::History, [writer.to_string()]).expect("well formed");
    let (mut count, mut after) = (0, None::<String>);
    loop {
        let page = store.list(&prefix, after.as_deref(), MAX_PAGE_RECORDS).await.expect("reads");
        for record in &page.records {
            count += 1;
            assert_eq!(record.key, log(writer, count), "a commit is missing in the middle");
        }
        match page.records.last() {
            Some(last) if page.more => after = Some(last.key.path().to_owned()),
            _ => return count,
        }
    }
}
