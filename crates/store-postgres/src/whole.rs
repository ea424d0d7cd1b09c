//! A schema read as a whole, and written as a whole: one transaction each.

use std::time::Duration;

use ate_store::{
    Contents, Counts, Entry, Fault, IfOccupied, Key, Kind, LostTail, MAX_CHANGE_BYTES, MAX_PAGE_RECORDS, Mutation,
    Prefix, Record, Replacement, Revision,
};
use futures::{StreamExt, stream};
use tokio::sync::mpsc;
use tokio_postgres::{Client, Transaction};
use tokio_util::task::AbortOnDropHandle;

use crate::error::{ConnectError, Trouble, column, signed, unsigned};
use crate::layout::{KNOWN_LAYOUT, Statements};
use crate::reads::{range, record};
use crate::session::{check_server, seconds, session};
use crate::{Address, Schema, Settings, check_seen, seen};

/// Entries between the server and whoever takes them, besides a page of at most [`ate_store::MAX_PAGE_BYTES`].
const ON_THE_WAY: usize = 256;

/// Mutations in one statement of a load, which also ends at [`MAX_CHANGE_BYTES`] of values.
const BATCH: usize = 1000;

/// How long the other side, a file on a slow disk, may take for its part before the server ends the transaction.
const OTHER_SIDE: Duration = Duration::from_secs(600);

/// Emptying a schema of millions of records, and counting them, is one statement.
const LONG_STATEMENT: Duration = Duration::from_secs(3600);

/// Reads the store while others use it: everything is as of one commit. Nothing is written, nor made if it is not there.
pub async fn contents(settings: &Settings, tail: LostTail) -> Result<Contents, ConnectError> {
    // Before the store is looked at: whoever uses it moves both on.
    let seen = seen(settings).await?;
    let (client, statements) = open(settings, "reader of everything").await?;
    let failed = |trouble: Trouble| trouble.at(&settings.address);
    let found = settings.schema.layout(&client).await.map_err(|error| failed(error.into()))?;
    if found > KNOWN_LAYOUT {
        let (address, schema) = (settings.address.clone(), settings.schema.clone());
        return Err(ConnectError::TooNew { address, schema, found });
    }
    if found < KNOWN_LAYOUT {
        let (address, schema) = (settings.address.clone(), settings.schema.clone());
        return Err(ConnectError::NoStore { address, schema });
    }
    let begin = format!(
        "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; SET LOCAL idle_in_transaction_session_timeout = '{}';
        SET LOCAL statement_timeout = '{}'",
        seconds(OTHER_SIDE),
        seconds(LONG_STATEMENT)
    );
    client.batch_execute(&begin).await.map_err(|error| failed(error.into()))?;
    let head = client.query_one(&statements.head, &[]).await.map_err(|error| failed(error.into()))?;
    let revision = Revision(unsigned(&head, 1).map_err(|fault| failed(Trouble::Wrong(fault)))?);
    if tail == LostTail::Refuse {
        check_seen(settings, seen, revision)?;
    }

    let (entries, arriving) = mpsc::channel(ON_THE_WAY);
    let reading = AbortOnDropHandle::new(tokio::spawn(async move {
        match read(&client, &statements, &entries).await {
            Ok(()) => {}
            Err(trouble) => drop(entries.send(Err(trouble.into())).await),
        }
    }));
    let entries = stream::unfold(Some((arriving, reading)), |reading| async move {
        let (mut arriving, reading) = reading?;
        match arriving.recv().await {
            Some(entry) => Some((entry, Some((arriving, reading)))),
            // Whoever sent them may have fallen over halfway.
            None => reading.await.err().map(|error| (Err(Fault::Unavailable { reason: error.to_string() }), None)),
        }
    });
    Ok(Contents { revision, lost: (seen > revision).then_some(seen), entries: entries.boxed() })
}

type Sender = mpsc::Sender<Result<Entry, Fault>>;

async fn read(client: &Client, statements: &Statements, entries: &Sender) -> Result<(), Trouble> {
    let page = client.prepare(&statements.page).await?;
    let limit = i64::try_from(MAX_PAGE_RECORDS).expect("a small constant");
    for kind in Contents::ORDER {
        let (mut after, end) = range(&Prefix::all(kind));
        loop {
            let rows = client.query(&page, &[&kind.name(), &after, &end, &limit]).await?;
            let mut last = None;
            for row in &rows {
                let path: String = column(row, 0).map_err(Trouble::Wrong)?;
                let entry = match Key::parse(kind, &path) {
                    Ok(key) => Entry::Record(record(key, row, 1).map_err(Trouble::Wrong)?),
                    Err(error) => Entry::Foreign { key: format!("{kind}/{path}"), reason: error.to_string() },
                };
                last = Some(path);
                if entries.send(Ok(entry)).await.is_err() {
                    return Ok(());
                }
            }
            match last {
                Some(last) => after = last,
                None => break,
            }
        }
    }
    let known: Vec<&str> = Kind::ALL.iter().map(|kind| kind.name()).collect();
    let foreign = client.query_raw(&statements.foreign, [&known]).await?;
    let mut foreign = std::pin::pin!(foreign);
    while let Some(row) = foreign.next().await {
        let row = row?;
        let (kind, path) = (column::<&str>(&row, 0), column::<&str>(&row, 1));
        let key = format!("{}/{}", kind.map_err(Trouble::Wrong)?, path.map_err(Trouble::Wrong)?);
        let reason = "no kind of record that this program knows".to_owned();
        if entries.send(Ok(Entry::Foreign { key, reason })).await.is_err() {
            return Ok(());
        }
    }
    Ok(())
}

/// Why a store was not put in a schema. What was there is there still.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error(
        "schema \"{schema}\" at {address} holds a store already ({counts}); choose another schema, or say --replace to remove it"
    )]
    Occupied { address: Address, schema: Schema, counts: Counts },
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("what is to be loaded cannot be read")]
    Source(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// Makes the schema hold what the replacement's mutations come to; all of it, or what it held before. Commits wait meanwhile,
/// readers see what was there. `replacement` is told how far the commit line has got, or had when it was last seen from here; it
/// stands still from then on.
pub async fn load(
    settings: &Settings,
    occupied: IfOccupied,
    replacement: impl FnOnce(Revision) -> Replacement,
) -> Result<(), LoadError> {
    let seen = seen(settings).await?;
    let (mut client, statements) = open(settings, "loader").await?;
    let failed = |trouble: Trouble| LoadError::Connect(trouble.at(&settings.address));
    let found = settings.schema.move_on(&mut client).await.map_err(|error| failed(error.into()))?;
    if found > KNOWN_LAYOUT {
        let (address, schema) = (settings.address.clone(), settings.schema.clone());
        return Err(ConnectError::TooNew { address, schema, found }.into());
    }
    // Dropped, it rolls back.
    let transaction = client.transaction().await.map_err(|error| failed(error.into()))?;
    let (head, is_occupied, counts) = take_turn(&transaction, &statements).await.map_err(failed)?;
    if is_occupied && occupied == IfOccupied::Refuse {
        let (address, schema) = (settings.address.clone(), settings.schema.clone());
        return Err(LoadError::Occupied { address, schema, counts });
    }
    transaction.batch_execute(&statements.clear).await.map_err(|error| failed(error.into()))?;
    let Replacement { revision, mut mutations } = replacement(head.max(seen));
    let (mut batch, mut bytes) = (Vec::new(), 0);
    while let Some(mutation) = mutations.next().await {
        let mutation = mutation.map_err(LoadError::Source)?;
        bytes += if let Mutation::Put(record) = &mutation { record.value.len() } else { 0 };
        batch.push(mutation);
        if batch.len() == BATCH || bytes >= MAX_CHANGE_BYTES {
            write(&transaction, &statements, &batch).await.map_err(failed)?;
            (batch, bytes) = (Vec::new(), 0);
        }
    }
    write(&transaction, &statements, &batch).await.map_err(failed)?;
    let finish = async {
        transaction.execute(&statements.loaded, &[&signed(revision.0), &settings.schema.channel()]).await?;
        transaction.commit().await
    };
    finish.await.map_err(|error| failed(error.into()))
}

/// Takes the turn to commit and keeps it; tells where the commit line is, whether anything is there, and what of it this program
/// knows.
async fn take_turn(
    transaction: &Transaction<'_>,
    statements: &Statements,
) -> Result<(Revision, bool, Counts), Trouble> {
    let limits = format!(
        "SET LOCAL idle_in_transaction_session_timeout = '{}'; SET LOCAL statement_timeout = '{}'",
        seconds(OTHER_SIDE),
        seconds(LONG_STATEMENT)
    );
    transaction.batch_execute(&limits).await?;
    let head = transaction.query_one(&statements.lock, &[]).await?;
    let head = Revision(unsigned(&head, 1).map_err(Trouble::Wrong)?);
    let mut counts = Counts::default();
    let rows = transaction.query(&statements.counts, &[]).await?;
    for row in &rows {
        if let Some(kind) = Kind::named(column(row, 0).map_err(Trouble::Wrong)?) {
            counts.0.insert(kind, unsigned(row, 1).map_err(Trouble::Wrong)?);
        }
    }
    Ok((head, !rows.is_empty(), counts))
}

/// Nothing that a batch takes back is written again later, so all that is put can go before all that is deleted.
async fn write(transaction: &Transaction<'_>, statements: &Statements, batch: &[Mutation]) -> Result<(), Trouble> {
    let puts = || {
        batch.iter().filter_map(|mutation| match mutation {
            Mutation::Put(record) => Some(record),
            Mutation::Deleted(_) => None,
        })
    };
    let key = |record: &Record| (record.key.kind().name(), record.key.path().to_owned());
    let (kinds, paths): (Vec<_>, Vec<_>) = puts().map(key).unzip();
    let versions: Vec<i64> = puts().map(|record| signed(record.version)).collect();
    let revisions: Vec<i64> = puts().map(|record| signed(record.revision.0)).collect();
    let values: Vec<&[u8]> = puts().map(|record| &record.value[..]).collect();
    transaction.execute(&statements.load, &[&kinds, &paths, &versions, &revisions, &values]).await?;
    let gone = batch.iter().filter_map(|mutation| match mutation {
        Mutation::Put(_) => None,
        Mutation::Deleted(key) => Some((key.kind().name(), key.path())),
    });
    let (kinds, paths): (Vec<_>, Vec<_>) = gone.unzip();
    transaction.execute(&statements.unload, &[&kinds, &paths]).await?;
    Ok(())
}

async fn open(settings: &Settings, role: &str) -> Result<(Client, Statements), ConnectError> {
    let client = session(&settings.address, role).await?;
    let checked = check_server(&client, &settings.address, settings.volatile).await;
    checked.map_err(|trouble| trouble.at(&settings.address))?;
    Ok((client, Statements::new(&settings.schema)))
}
