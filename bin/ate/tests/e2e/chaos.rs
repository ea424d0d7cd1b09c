use std::time::Duration;

use crate::ATE;

/// A minute of what `make chaos` does for as long as one likes, with other faults each time.
#[tokio::test]
async fn a_minute_of_faults_loses_nothing_that_was_acknowledged() {
    let seed = std::time::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs());
    let evidence = std::env::temp_dir().join(format!("ate-chaos-{seed}"));
    let plan = ate_chaos::Plan { program: ATE.into(), length: Duration::from_secs(60), seed, evidence };
    match ate_chaos::run(&plan).await {
        Ok(report) => {
            eprintln!("{report}");
            assert!(report.examined.answers > 0 && report.examined.suspends > 0, "nothing was shown: {report}");
            for kill in ["kill api", "kill node", "kill router", "kill worker", "kill sandbox"] {
                assert!(report.faults.contains_key(kill), "no {kill}: {report}");
            }
        }
        Err(error) => panic!("{error:#}\n  again: make chaos MINUTES=1 SEED={seed}"),
    }
}
