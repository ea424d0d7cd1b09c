use ate_name::Digest;

use super::*;

fn digest(byte: u8) -> Digest {
    Digest::from_bytes([byte; 32])
}

/// A machine that lacks nothing.
fn healthy() -> Facts {
    let knob =
        |name| Knob { name, path: format!("/sys/{name}").into(), setting: Some("always".into()), inherited: None };
    Facts {
        is_root: true,
        kernel: (6, 12),
        kernel_name: "6.12.1".into(),
        cgroups: facts::Cgroups { version: 2, controllers: ["cpu", "memory", "pids"].map(String::from).into() },
        tools: [("ip", "/sbin/ip".into()), ("nft", "/sbin/nft".into())].into(),
        namespaces: ["mnt", "net", "pid", "user"].map(|kind| (kind, Some(100))).into(),
        overlay: Ok(()),
        durable: Ok(()),
        memfd: Ok(()),
        anonymous_pages: knob("64K pages"),
        shared_pages: knob("64K shared"),
        runtime: Ok((
            "/cache".into(),
            vec![RuntimeFile { name: "runsc".into(), pinned: digest(1), found: Some(digest(1)) }],
        )),
        ports: vec![(8080, "--listen", None)],
        disk_free: Some(LEAST_DISK),
        memory_free: Some(LEAST_MEMORY),
    }
}

/// The one check that is not ok after `change`.
fn after(change: impl FnOnce(&mut Facts)) -> Check {
    let mut facts = healthy();
    change(&mut facts);
    let mut faults: Vec<Check> = checks(&facts).into_iter().filter(|check| check.state != State::Ok).collect();
    assert_eq!(faults.len(), 1, "{faults:?}");
    let fault = faults.remove(0);
    assert!(!fault.cost.is_empty() && !fault.remedy.is_empty(), "{fault:?}");
    fault
}

fn is_fatal(check: &Check) -> bool {
    check.needed && check.state == State::Missing
}

#[test]
fn a_machine_that_lacks_nothing_is_told_so() {
    assert!(checks(&healthy()).iter().all(|check| check.state == State::Ok));
}

#[test]
fn each_thing_that_is_needed_is_missed_and_its_remedy_told() {
    let remedies = [
        after(|facts| facts.is_root = false),
        after(|facts| facts.kernel = (5, 2)),
        after(|facts| {
            facts.cgroups.controllers.remove("pids");
        }),
        after(|facts| facts.cgroups.version = 1),
        after(|facts| {
            facts.tools.remove("nft");
        }),
        after(|facts| {
            facts.namespaces.insert("net", None);
        }),
        after(|facts| {
            facts.namespaces.insert("net", Some(0));
        }),
        after(|facts| facts.overlay = Err("no such device".into())),
        after(|facts| facts.memfd = Err("not implemented".into())),
        after(|facts| facts.durable = Err("there are no loop devices".into())),
        after(|facts| facts.runtime = Err("not built".into())),
        after(|facts| facts.runtime.as_mut().unwrap().1[0].found = None),
        after(|facts| facts.runtime.as_mut().unwrap().1[0].found = Some(digest(2))),
    ];
    assert!(remedies.iter().all(is_fatal), "{remedies:?}");
    assert_eq!(remedies[4].remedy, "apt-get install nftables");
    assert!(remedies[3].found.contains("cpuacct"), "version 1 counts processor time in a hierarchy of its own");
    assert_eq!(remedies[6].fixes[0].path, Path::new("/proc/sys/user/max_net_namespaces"));
    assert!(remedies[12].found.contains("runsc is not what is pinned"));
}

#[test]
fn what_only_costs_time_or_room_is_no_failure() {
    let slow = [
        after(|facts| facts.kernel = (6, 1)),
        after(|facts| facts.shared_pages.setting = Some("never".into())),
        after(|facts| facts.anonymous_pages.setting = None),
        after(|facts| facts.ports[0].2 = Some("taken".into())),
        after(|facts| facts.disk_free = Some(LEAST_DISK - 1)),
        after(|facts| facts.memory_free = Some(0)),
    ];
    assert!(!slow.iter().any(is_fatal), "{slow:?}");
    assert_eq!(slow[1].fixes, [Fix { path: "/sys/64K shared".into(), value: "always".into() }]);
    assert!(slow[2].fixes.is_empty(), "what is not there cannot be set");
}

#[test]
fn inherited_pages_are_what_the_general_setting_says() {
    let inherit = |general: &str| {
        let mut facts = healthy();
        facts.shared_pages.setting = Some("inherit".into());
        facts.shared_pages.inherited = Some(general.into());
        checks(&facts).iter().all(|check| check.state == State::Ok)
    };
    assert!(inherit("always"));
    assert!(!inherit("madvise"));
}

#[test]
fn a_fix_writes_its_value_and_says_where_it_cannot() {
    let directory = tempfile::tempdir().unwrap();
    let fix = Fix { path: directory.path().join("enabled"), value: "always".into() };
    std::fs::write(&fix.path, "never").unwrap();
    fix.apply().unwrap();
    assert_eq!(std::fs::read_to_string(&fix.path).unwrap(), "always");
    let nowhere = Fix { path: directory.path().join("no/such"), value: "always".into() };
    assert!(format!("{:#}", nowhere.apply().unwrap_err()).contains("no/such"));
}

#[test]
fn the_kernels_own_words_are_understood() {
    assert_eq!(facts::release("6.12.41+deb13-amd64"), (6, 12));
    assert_eq!(facts::release("odd"), (0, 0));
    assert_eq!(facts::chosen("always inherit madvise [never]\n").as_deref(), Some("never"));
    assert_eq!(facts::chosen("garbage"), None);
    assert_eq!(facts::memory_free("MemTotal: 9 kB\nMemAvailable:    2048 kB\n"), Some(2 << 20));
    assert_eq!(facts::memory_free("MemAvailable: many\n"), None);
}
