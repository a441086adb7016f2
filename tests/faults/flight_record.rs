//! Flight records: an injected hang is named by them. The cases that PyTorch's records could not show: members and the
//! window's begin (pytorch#117883), files that others can read (pytorch#140879), a record of a rank that is in teardown
//! (pytorch#196968).

use crate::{
    on_both,
    rig::assert_works,
    support::{failure, until},
};
use gpu_pool::{Error, FlightRecord, GpuPool, ReduceOp};
use serde_json::{Value, json};
use std::{
    fs,
    path::{Path, PathBuf},
    sync::{Mutex, mpsc::channel},
    thread,
    time::Duration,
};

const DEADLINE: Duration = Duration::from_secs(1);

fn folder(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("gpu-pool-record-{}-{name}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    folder
}

/// The text and the JSON of each record in a folder, in the order of their numbers.
fn files(folder: &Path) -> Vec<(String, Value)> {
    let record = |number| {
        let file = folder.join(format!("gpu-pool-{}-{number}.txt", std::process::id()));
        let json = fs::read_to_string(file.with_extension("json")).ok()?;
        Some((fs::read_to_string(file).ok()?, serde_json::from_str(&json).unwrap()))
    };
    (0..).map_while(record).collect()
}

fn parsed(record: &FlightRecord) -> Value {
    serde_json::from_str(&record.to_json()).unwrap()
}

fn records(json: &Value, device: usize) -> &Vec<Value> {
    json["devices"][device]["records"].as_array().unwrap()
}

fn last<'r>(json: &'r Value, device: usize, op: &str) -> &'r Value {
    let of_op = |record: &&Value| record["kind"] != "wait" && record["op"] == op;
    records(json, device).iter().rev().find(of_op).unwrap_or_else(|| panic!("{op}: {json}"))
}

/// Device 1 does not come to the sum, since `stuck` does not end before device 0 has given up.
fn hang(pool: &GpuPool, stuck: impl Fn(&dyn Fn()) + Sync) {
    let (given_up, gives_up) = channel::<()>();
    let (given_up, gives_up) = (Mutex::new(Some(given_up)), Mutex::new(gives_up));
    let error = failure(pool.run(|dev, _| {
        let mut x = dev.upload(&[1.0f32; 64])?;
        if dev.index() == 1 {
            stuck(&|| gives_up.lock().unwrap().recv().unwrap_or(()));
        }
        let sum = dev.all_reduce(&mut x, ReduceOp::Sum);
        drop(given_up.lock().unwrap().take());
        sum
    }));
    assert!(matches!(&error, Error::Timeout { missing, .. } if missing == &[1]), "{error}");
}

on_both! {
    2: fn a_hang_is_named_by_files_that_are_not_overwritten(gpus) {
        let folder = folder(if gpus.is_cuda() { "cuda" } else { "host" });
        let pool = gpus.builder(2).timeout(DEADLINE).flight_record(&folder).build().unwrap();
        assert_works(&pool);
        for round in 1..=2 {
            hang(&pool, |until_others_give_up| until_others_give_up());
            assert_eq!(files(&folder).len(), round);
        }
        for (text, json) in files(&folder) {
            println!("{text}");
            assert_eq!((&json["gpu_pool_flight_record"], &json["missing"]), (&1.into(), &json!([1])));
            assert!(json["reason"].as_str().unwrap().contains("no progress"), "{text}");
            // What each did last, with the members, and that it is not over.
            let sum = last(&json, 0, "all_reduce");
            assert_eq!([&sum["members"], &sum["bytes"], &sum["ended"]], [&json!([0, 1]), &json!(256), &json!(false)]);
            assert!(sum["algorithm"].is_string(), "{sum}");
            assert!(sum["file"].as_str().unwrap().ends_with("flight_record.rs"), "{sum}");
            let wait = records(&json, 0).last().unwrap();
            let of_wait = [&wait["kind"], &wait["awaited"], &wait["call"]];
            assert_eq!(of_wait, [&json!("wait"), &json!(1), &json!("all_reduce")]);
            let call = |record: &&Value| record["kind"] == "call";
            assert_eq!(records(&json, 1).iter().rev().find(call).unwrap()["op"], "upload");
            // The window's begin is known: these pools are young.
            assert_eq!([&json["devices"][0]["first"], &records(&json, 0)[0]["number"]], [0, 0]);
            assert!(text.contains("device 0 waits for device 1 in all_reduce at "), "{text}");
            assert!(text.contains("device 1 is MISSING: it runs the closure of "), "{text}");
            assert!(text.contains("its last call: upload"), "{text}");
        }
        assert_works(&pool);
        fs::remove_dir_all(folder).unwrap();
    }

    1: fn what_the_device_has_done_is_known(gpus) {
        let pool = gpus.builder(1).build().unwrap();
        let during = Mutex::new(None);
        pool.run(|dev, _| {
            let mut x = dev.zeros::<f32>(1 << 10)?;
            (0..40).try_for_each(|_| dev.fill(&mut x, 1.0))?;
            dev.synchronize()?;
            *during.lock().unwrap() = Some(parsed(&pool.flight_record()));
            Ok(())
        }).unwrap();
        let json = during.into_inner().unwrap().unwrap();
        let fills: Vec<_> = records(&json, 0).iter().filter(|record| record["op"] == "fill").collect();
        assert_eq!(fills.len(), 40);
        assert!(fills.iter().all(|fill| fill["done"] == true && fill["bytes"] == 4096), "{fills:?}");
        // The closure is not over, and nobody is missing.
        let closure = last(&json, 0, "scope begin");
        assert_eq!([&closure["kind"], &closure["ended"]], [&json!("scope"), &json!(false)]);
        assert_eq!(json["missing"], json!([]));
    }

    1: fn the_window_moves_and_says_where_it_begins(gpus) {
        let pool = gpus.builder(1).build().unwrap();
        let record = || parsed(&pool.flight_record());
        pool.run(|dev, _| {
            let mut x = dev.zeros::<f32>(1)?;
            (0..1500).try_for_each(|_| dev.fill(&mut x, 1.0))
        }).unwrap();
        let json = record();
        let all = records(&json, 0);
        assert_eq!(all.len(), 1024);
        assert!(json["devices"][0]["first"] == all[0]["number"] && all[0]["number"].as_u64() > Some(476), "{}", all[0]);
        assert_eq!(json["devices"][0]["next"].as_u64(), all[1023]["number"].as_u64().map(|last| last + 1));
    }
}

/// A device that hangs while its closure unwinds: its record is there (pytorch#196968).
#[test]
fn a_device_that_hangs_in_teardown_is_recorded() {
    struct Slow<'f>(&'f dyn Fn());
    impl Drop for Slow<'_> {
        fn drop(&mut self) {
            (self.0)();
        }
    }
    let folder = folder("teardown");
    let pool = crate::support::builder().host(2).timeout(DEADLINE).flight_record(&folder).build().unwrap();
    hang(&pool, |until_others_give_up| {
        let _slow = Slow(until_others_give_up);
        panic!("a closure fails, and its values do not come to an end");
    });
    let all = files(&folder);
    let (text, json) = &all[0];
    assert_eq!(json["missing"], json!([1]), "{text}");
    assert_eq!(last(json, 1, "upload")["ended"], true);
    assert_works(&pool);
    fs::remove_dir_all(folder).unwrap();
}

/// A closure that waits for something outside of the pool, while nothing waits for it: the caller's thread writes.
#[test]
fn a_scope_without_progress_is_recorded() {
    let folder = folder("scope");
    let to = folder.join("run7");
    let pool = crate::support::builder().host(1).timeout(DEADLINE).flight_record(&to).build().unwrap();
    let file = folder.join(format!("run7-{}-0.json", std::process::id()));
    pool.run(|dev, _| {
        drop(dev.upload(&[1u8])?);
        until("the record is there", || file.exists())
    })
    .unwrap();
    thread::sleep(Duration::from_millis(20));
    let json: Value = serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap();
    assert_eq!(json["missing"], json!([0]));
    assert!(json["reason"].as_str().unwrap().contains("closures that make no progress"), "{json}");
    fs::remove_dir_all(folder).unwrap();
}
