use super::*;
use crate::{Backend, collective::Algorithm, lab::texts, memory::BackingChoice};
use proptest::prelude::*;

#[test]
fn a_misspelt_variable_is_found_with_the_name_that_was_meant() {
    let named = |rest: &str| format!("{PREFIX}{rest}");
    for (wrong, meant) in [
        ("TIMOUT", Some("TIMEOUT")),
        ("TIMEOUTS", Some("TIMEOUT")),
        ("ALGORTIHM", Some("ALGORITHM")),
        ("DEVICE", Some("DEVICES")),
        ("timeout", Some("TIMEOUT")),
        ("COLOUR", None),
        ("", None),
    ] {
        assert!(is_unknown(&named(wrong)), "{wrong}");
        assert_eq!(nearest(&named(wrong)), meant.map(named), "{wrong}");
    }
    assert!(KNOWN.iter().all(|known| !is_unknown(&named(known))));
    assert!(!is_unknown("GPU") && !is_unknown("gpu_poolside") && !is_unknown("GPU_PÖÖL_X"));
    assert!(is_unknown(&named("TIMEOUT").to_lowercase()));
    assert_eq!(distance("kitten", "sitting"), 3);
}

/// Each variable of a pool is in both tables, and each value of those that have a list is in both, too.
#[test]
fn the_documentation_names_all_variables_and_values() {
    let sources = [include_str!("../../../src/builder.rs"), include_str!("../../../docs/src/guide/environment.md")];
    let this = include_str!("../../../src/builder/environment.rs").split("#[cfg(test)]").next().unwrap();
    let read: Vec<_> = this.split("\"GPU_POOL_").skip(1).map(|rest| rest.split('"').next().unwrap()).collect();
    assert!(read.len() >= 11, "{read:?}");
    for name in read.into_iter().filter(|name| !name.is_empty()) {
        for source in sources {
            assert!(source.contains(&format!("GPU_POOL_{name}")), "{name} is not documented");
        }
    }
    let line = |source: &'static str, name: &str| {
        source.lines().find(|line| line.contains(&format!("`GPU_POOL_{name}"))).unwrap_or_else(|| panic!("{name}"))
    };
    for (name, values) in [
        ("ALGORITHM", &["auto", "direct", "exchange", "copies", "staged", "host", "ring"][..]),
        ("MEMORY", &["vmm", "malloc"]),
        ("CHECK", &["races", "memory"]),
        ("BACKEND", &["cuda", "host"]),
    ] {
        for source in sources {
            let missing = values.iter().find(|value| !line(source, name).contains(**value));
            assert_eq!(missing, None, "{name}: {}", line(source, name));
        }
    }
}

/// Names in the sources that are not variables: kinds of faults, and the wrong names in tests.
const NO_VARIABLES: [&str; 3] = ["MISUSE", "DEADLOCK", "TIMOUT"];

#[test]
fn the_list_of_variables_is_complete() {
    fn look(path: &std::path::Path, found: &mut std::collections::BTreeMap<String, String>) {
        if path.is_dir() {
            std::fs::read_dir(path).unwrap().for_each(|entry| look(&entry.unwrap().path(), found));
            return;
        }
        let text = String::from_utf8_lossy(&std::fs::read(path).unwrap()).into_owned();
        for after in text.split(PREFIX).skip(1) {
            let end = after.find(|c: char| !(c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_'));
            let name = &after[..end.unwrap_or(after.len())];
            if !name.is_empty() {
                found.insert(name.to_owned(), path.display().to_string());
            }
        }
    }
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut found = std::collections::BTreeMap::new();
    // A published crate lacks some of them.
    let places =
        ["src", "crates", "tests", "loom_tests", "benches", "examples", "docs", "nccl", ".ci", ".cargo", "README.md"];
    places.map(|place| root.join(place)).iter().filter(|place| place.exists()).for_each(|at| look(at, &mut found));
    assert!(found.len() > 20, "{found:?}");
    found.retain(|name, _| !KNOWN.contains(&&**name) && !NO_VARIABLES.contains(&&**name));
    assert!(found.is_empty(), "`KNOWN` lacks these, here with a file that names each: {found:#?}");
    assert!(KNOWN.is_sorted());
}

#[test]
fn environment_values() {
    assert_eq!(parsed("host:8"), Some(Backend::Host(8)));
    assert_eq!(parsed("cuda"), Some(Backend::Cuda));
    assert_eq!(parsed::<Backend>("host:x"), None);
    assert_eq!(parsed::<Backend>("gpu"), None);
    assert_eq!(parse_devices("0, 2,1"), Some(vec![0, 2, 1]));
    assert_eq!(parse_devices("0,,1"), None);
    assert_eq!(parse_duration("500ms"), Some(Duration::from_millis(500)));
    assert_eq!(parse_duration("2m"), Some(Duration::from_secs(120)));
    assert_eq!(parse_duration("-1s"), None);
    assert_eq!(parse_duration("0"), None);
    assert_eq!(parse_duration("1e-12s"), None, "it would be zero");
    assert_eq!(parse_duration("1e300s"), None);
    assert_eq!(parse_duration("soon"), None);
    assert_eq!(parse_duration("0s"), None);
    assert_eq!(parse_duration("1e-300s"), None, "no time, too");
}

static VALUES: &[&str] = &["host:8", "cuda", "0, 2,1", "500ms", "1e-9s", "2m", "vmm", "exchange", "ring"];

proptest! {
    #![proptest_config(texts::cases(256))]

    #[test]
    fn any_text_is_a_value_or_none(text in texts::like(VALUES)) {
        if let Some(time) = parse_duration(&text) {
            prop_assert!(!time.is_zero());
        }
        if let Some(devices) = parse_devices(&text) {
            prop_assert_eq!(devices.len(), text.split(',').count());
        }
        let _ = (parsed::<Backend>(&text), parsed::<BackingChoice>(&text), parse_switch(&text));
        let _ = (share::parse(&text), text.parse::<u64>(), text.parse::<Algorithm>());
    }

    #[test]
    fn a_value_that_is_written_is_read(devices: Vec<usize>, nanos in 1u64.., count: usize) {
        let list: Vec<String> = devices.iter().map(usize::to_string).collect();
        prop_assert_eq!(parse_devices(&list.join(",")), Some(devices).filter(|devices| !devices.is_empty()));
        prop_assert_eq!(parsed(&format!("host:{count}")), Some(Backend::Host(count)));
        let (time, seconds) = (Duration::from_nanos(nanos), nanos as f64 / 1e9);
        let read = parse_duration(&format!("{seconds}s")).unwrap();
        let tolerance = time / 1_000_000_000 + Duration::from_nanos(1);
        prop_assert!(read.abs_diff(time) <= tolerance, "{read:?}, not {time:?}");
    }
}

/// The names of settings are those that their texts show.
#[test]
fn names_of_settings_are_read_as_they_are_shown() {
    for backend in [Backend::Cuda, Backend::Host(3)] {
        assert_eq!(backend.to_string().parse::<Backend>().unwrap(), backend);
    }
    for choice in [BackingChoice::Auto, BackingChoice::Vmm, BackingChoice::Malloc] {
        assert_eq!(choice.to_string().parse::<BackingChoice>().unwrap(), choice);
    }
    use Algorithm::*;
    for algorithm in [Auto, Direct, Inbox, Exchange, Copies, Staged, Host, Ring] {
        assert_eq!(format!("{algorithm:>8}").trim().parse::<Algorithm>().unwrap(), algorithm);
    }
    assert!("Auto".parse::<Algorithm>().unwrap_err().to_string().contains("exchange"));
}
