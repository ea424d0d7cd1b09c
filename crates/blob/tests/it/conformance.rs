//! What every backend promises. Each function is one promise and works below a prefix of its own.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{Read, Write};

use ate_blob::{BlobError, BlobPath, Blobs};
use bytes::Bytes;
use futures::future::join_all;
use futures::stream::{self, StreamExt, TryStreamExt};

/// Larger than what is sent at once, and no multiple of it.
const LARGE: usize = (20 << 20) + 77;

pub(crate) async fn keeps_all_promises(blobs: &Blobs, bucket: &str) {
    let prefix = |name: &str| path(&format!("s3://{bucket}/{name}"));
    what_is_put_is_read_back(blobs, &prefix("back")).await;
    the_same_bytes_may_be_put_again_and_others_may_not(blobs, &prefix("again")).await;
    of_many_writers_one_wins(blobs, &prefix("race"), 1000, 16).await;
    of_many_writers_one_wins(blobs, &prefix("large-race"), LARGE, 3).await;
    what_is_absent_is_missing(blobs, &prefix("absent")).await;
    a_listing_has_all_that_is_below_its_prefix(blobs, &prefix("list")).await;
    a_deletion_takes_a_prefix_and_not_its_neighbour(blobs, &prefix("delete")).await;
    a_whole_bucket_is_not_put_or_deleted(blobs, &path(&format!("s3://{bucket}"))).await;
}

pub(crate) fn path(text: &str) -> BlobPath {
    BlobPath::parse(text).unwrap()
}

fn below(prefix: &BlobPath, name: &str) -> BlobPath {
    path(&format!("{prefix}/{name}"))
}

/// Bytes that differ with the seed, and at every offset.
pub(crate) fn content(seed: usize, length: usize) -> Bytes {
    (0..length).map(|at| (at * 31 + at / 251 + seed).to_le_bytes()[0]).collect()
}

fn file(bytes: &[u8]) -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    file
}

async fn what_is_put_is_read_back(blobs: &Blobs, prefix: &BlobPath) {
    for length in [0, 1, 8 << 20, (8 << 20) + 1, LARGE] {
        let expected = content(length, length);
        for (kind, source) in [("bytes", expected.clone().into()), ("file", file(&expected).into())] {
            let source: ate_blob::Source = source;
            let object = below(prefix, &format!("{length}/{kind}"));
            blobs.put_new(&object, source).await.unwrap();
            assert_eq!(blobs.size(&object).await.unwrap(), Some(length as u64));
            assert!(blobs.get_bytes(&object, length as u64).await.unwrap() == expected, "{object}");
            let (mut got, mut target) = (Vec::new(), tempfile::NamedTempFile::new().unwrap());
            let size = blobs.get_to_file(&object, target.reopen().unwrap()).await.unwrap();
            target.read_to_end(&mut got).unwrap();
            assert!(size == length as u64 && got == expected, "{object}");
            if length > 0 {
                let refused = blobs.get_bytes(&object, length as u64 - 1).await.unwrap_err();
                assert!(matches!(refused, BlobError::TooLarge { .. }), "{refused}");
            }
        }
    }
}

async fn the_same_bytes_may_be_put_again_and_others_may_not(blobs: &Blobs, prefix: &BlobPath) {
    for length in [0, 100, LARGE] {
        let object = below(prefix, &length.to_string());
        let first = content(1, length);
        let mut last_differs = first.to_vec();
        let last = last_differs.pop().map_or(0, |last| !last);
        last_differs.push(last);
        blobs.put_new(&object, first.clone()).await.unwrap();
        blobs.put_new(&object, first.clone()).await.unwrap();
        for other in [last_differs.into(), content(1, length + 1)] {
            let error = blobs.put_new(&object, other).await.unwrap_err();
            assert!(matches!(&error, BlobError::Exists { object: named } if *named == object), "{error}");
        }
        assert!(blobs.get_bytes(&object, u64::MAX).await.unwrap() == first);
    }
}

async fn of_many_writers_one_wins(blobs: &Blobs, prefix: &BlobPath, length: usize, writers: usize) {
    let object = below(prefix, "one");
    let put = |seed| blobs.put_new(&object, content(seed, length));
    let results = join_all((0..writers).map(put)).await;
    let winners: Vec<_> = (0..writers).filter(|&seed| results[seed].is_ok()).collect();
    assert_eq!(winners.len(), 1, "{results:?}");
    assert!(results.iter().flat_map(|result| result.as_ref().err()).all(|e| matches!(e, BlobError::Exists { .. })));
    assert!(blobs.get_bytes(&object, u64::MAX).await.unwrap() == content(winners[0], length));
}

async fn what_is_absent_is_missing(blobs: &Blobs, prefix: &BlobPath) {
    let object = below(prefix, "a/b");
    blobs.put_new(&below(prefix, "a/other"), content(0, 9)).await.unwrap();
    for absent in [&object, &below(prefix, "a/other/c"), &below(prefix, "a")] {
        assert_eq!(blobs.size(absent).await.unwrap(), None);
        let error = blobs.get_bytes(absent, 10).await.unwrap_err();
        assert!(matches!(&error, BlobError::Missing { object } if object == absent), "{error}");
    }
    for empty in [&object, &below(prefix, "a/other")] {
        assert!(blobs.list(empty).next().await.is_none(), "{empty}");
    }
    blobs.delete(&object).await.unwrap();
    blobs.delete(&below(prefix, "a/other/c")).await.unwrap();
    assert!(blobs.size(&below(prefix, "a/other")).await.unwrap().is_some());
}

async fn names(blobs: &Blobs, prefix: &BlobPath) -> BTreeSet<String> {
    let listed = blobs.list(prefix).map_ok(|info| info.path.to_string());
    listed.try_collect().await.unwrap()
}

async fn a_listing_has_all_that_is_below_its_prefix(blobs: &Blobs, prefix: &BlobPath) {
    // More than a page of S3.
    let objects: BTreeSet<_> = (0..1005).map(|i| below(prefix, &format!("in/{}/{i}", i % 7))).collect();
    let put = |object| async move { blobs.put_new(&object, content(0, 5)).await.unwrap() };
    stream::iter(objects.clone()).for_each_concurrent(32, put).await;
    blobs.put_new(&below(prefix, "inside"), content(0, 5)).await.unwrap();
    let expected: BTreeSet<_> = objects.iter().map(ToString::to_string).collect();
    assert_eq!(names(blobs, &below(prefix, "in")).await, expected);
    let one = blobs.list(&below(prefix, "in/0")).next().await.unwrap().unwrap();
    assert_eq!(one.size, 5);
    assert!(one.modified.elapsed().unwrap_or_default().as_secs() < 3600, "{one:?}");
    let whole_bucket = names(blobs, &path(&format!("s3://{}", prefix.bucket()))).await;
    assert!(whole_bucket.is_superset(&expected));
}

async fn a_deletion_takes_a_prefix_and_not_its_neighbour(blobs: &Blobs, prefix: &BlobPath) {
    for name in ["a/1", "a/b/2", "ab", "a-b/3"] {
        blobs.put_new(&below(prefix, name), content(0, 5)).await.unwrap();
    }
    let left = async |expected: &[&str]| {
        let expected: BTreeSet<_> = expected.iter().map(|name| below(prefix, name).to_string()).collect();
        assert_eq!(names(blobs, prefix).await, expected);
    };
    blobs.delete(&below(prefix, "a/1")).await.unwrap();
    left(&["a/b/2", "ab", "a-b/3"]).await;
    for _ in 0..2 {
        blobs.delete(&below(prefix, "a")).await.unwrap();
        left(&["ab", "a-b/3"]).await;
    }
    // What was deleted may be put again, with other bytes.
    blobs.put_new(&below(prefix, "a/1"), content(9, 9)).await.unwrap();
    left(&["a/1", "ab", "a-b/3"]).await;
}

async fn a_whole_bucket_is_not_put_or_deleted(blobs: &Blobs, bucket: &BlobPath) {
    let put = blobs.put_new(bucket, Bytes::new()).await;
    for refused in [put, blobs.delete(bucket).await, blobs.size(bucket).await.map(drop)] {
        assert!(matches!(refused, Err(BlobError::WholeBucket { .. })), "{refused:?}");
    }
}
