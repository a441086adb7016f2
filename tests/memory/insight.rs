//! What people see of a pool: snapshots, stats, call sites, pictures. (PyTorch `test_memory_snapshot*`,
//! `test_memory_plots*`, `_check_memory_stat_consistency`; TensorFlow `TestBinDebugInfo`; RMM `DumpLogOnFailure`.)

use crate::{
    on_both,
    rig::{KIB, MIB, Rng, assert_at_rest, assert_books, bytes_of, limited, on_backings},
    support::failure,
};
use gpu_pool::{
    DeviceBuffer, Error,
    memory::{BlockState, EventKind},
};
use std::{panic::Location, thread};

/// What PyTorch's viewer (`torch/utils/viz/MemoryViz.js`) and `torch/cuda/_memory_viz.py` take for granted.
#[cfg(feature = "insight")]
mod viz {
    use gpu_pool::memory::{EventKind, MemorySnapshot};
    use serde_json::Value;
    use std::collections::BTreeMap;

    pub fn check(snapshots: &[MemorySnapshot]) {
        let pickle = MemorySnapshot::memory_viz(snapshots);
        let viz: Value = serde_pickle::from_slice(&pickle, Default::default()).unwrap();
        assert_eq!(viz["device_traces"].as_array().unwrap().len(), snapshots.len());
        for snapshot in snapshots {
            let segments: Vec<&Value> = list(&viz["segments"]).filter(|s| s["device"] == snapshot.device).collect();
            // `segsum`: what is allocated, rounded and free adds up.
            let reserved: i64 = segments.iter().map(|segment| number(segment, "total_size")).sum();
            assert_eq!(reserved as u64, snapshot.stats.reserved);
            for segment in &segments {
                let size = |state: &str| -> i64 {
                    list(&segment["blocks"]).filter(|b| b["state"] == *state).map(|b| number(b, "size")).sum()
                };
                let (live, pending) = (size("active_allocated"), size("active_pending_free"));
                assert_eq!(live + pending + size("inactive"), number(segment, "total_size"));
                assert_eq!((live, live + pending), (number(segment, "allocated_size"), number(segment, "active_size")));
                assert!(list(&segment["blocks"]).all(|b| number(b, "requested_size") <= number(b, "size")));
            }
            replay(&segments, list(&viz["device_traces"][snapshot.device]));
            let frees =
                snapshot.events.iter().filter(|e| matches!(e.kind, EventKind::Freed | EventKind::FreedRemotely));
            let actions =
                |name: &str| list(&viz["device_traces"][snapshot.device]).filter(|e| e["action"] == *name).count();
            assert_eq!((actions("free_requested"), actions("free_completed")), (frees.clone().count(), frees.count()));
            assert!(actions("alloc") > 0 && actions("segment_map") > 0);
        }
        assert!(pickle.windows(10).any(|text| text == b"insight.rs"), "the call sites are in it");
    }

    fn list(value: &Value) -> impl DoubleEndedIterator<Item = &Value> {
        value.as_array().unwrap().iter()
    }

    fn number(value: &Value, name: &str) -> i64 {
        value[name].as_i64().unwrap_or_else(|| panic!("{name} of {value}"))
    }

    /// `simulate_memory`: the state before each event, backwards from the snapshot. Every block lies in a segment, and
    /// each event is about a block or a segment that is there.
    fn replay<'a>(segments: &[&Value], events: impl DoubleEndedIterator<Item = &'a Value>) {
        let mut blocks: BTreeMap<i64, i64> = BTreeMap::new();
        let mut mapped: BTreeMap<i64, i64> = BTreeMap::new();
        for segment in segments {
            mapped.insert(number(segment, "address"), number(segment, "total_size"));
            let live = list(&segment["blocks"]).filter(|block| block["state"] == "active_allocated");
            blocks.extend(live.map(|block| (number(block, "address"), number(block, "size"))));
        }
        let all = |mapped: &BTreeMap<i64, i64>, at: i64, size: i64| {
            mapped.range(..=at).next_back().is_some_and(|(start, length)| at + size <= start + length)
        };
        for event in events.rev() {
            if event["action"] == "oom" {
                continue;
            }
            let (at, size) = (number(event, "addr"), number(event, "size"));
            match event["action"].as_str().unwrap() {
                "alloc" => assert!(blocks.remove(&at).is_some(), "{event} is no live block"),
                "free_completed" => {
                    assert!(all(&mapped, at, size), "{event} is in no segment");
                    assert!(blocks.insert(at, size).is_none(), "{event} is about a live block");
                }
                "free_requested" => assert!(blocks.contains_key(&at), "{event}"),
                "segment_map" => {
                    let (&start, &length) = mapped.range(..=at).next_back().unwrap();
                    assert!(at + size <= start + length, "{event} is in no segment");
                    mapped.remove(&start);
                    for (from, to) in [(start, at), (at + size, start + length)] {
                        if from < to {
                            mapped.insert(from, to - from);
                        }
                    }
                }
                "segment_unmap" => {
                    let (mut from, mut to) = (at, at + size);
                    if let Some(length) = mapped.remove(&to) {
                        to += length;
                    }
                    if let Some((&start, &length)) = mapped.range(..from).next_back()
                        && start + length == from
                    {
                        from = start;
                    }
                    mapped.insert(from, to - from);
                }
                other => panic!("{other} is not an action that the pool has"),
            }
        }
        assert!(blocks.is_empty(), "everything was recorded, and yet these were there before: {blocks:?}");
    }
}

on_both! {
    // PyTorch: test_memory_snapshot(_with_cpp, _script): every live block, with its size and its place in the program.
    1: fn a_snapshot_names_every_live_block(gpus) {
        on_backings(|backing| {
            let pool = gpus.builder(1).memory_backing(backing).record_memory(true).build().unwrap();
            pool.run(|dev, _| {
                let mut rng = Rng(21);
                let line = Location::caller().line() + 1;
                let live = (0..80).map(|_| bytes_of(dev, rng.size(21))).collect::<Result<Vec<_>, _>>()?;
                let gone = (0..40).map(|_| bytes_of(dev, rng.size(21))).collect::<Result<Vec<DeviceBuffer<u8>>, _>>()?;
                drop(gone);
                let snapshot = dev.memory_snapshot();
                assert_books(&snapshot);
                assert!(snapshot.recorded && snapshot.device == 0);
                let blocks: Vec<_> = snapshot.blocks.iter().filter(|b| b.state == BlockState::Live).collect();
                assert_eq!(blocks.len(), live.len());
                for buffer in &live {
                    let block = blocks.iter().find(|b| b.address == buffer.address()).expect("a live block is missing");
                    assert!(block.requested == buffer.len() as u64 && block.bytes >= block.requested, "{block:?}");
                    assert!(block.stream.is_some() && block.since.is_some_and(|since| since <= snapshot.taken_at));
                    let site = block.site.as_ref().unwrap();
                    assert!(site.op == "uninit" && site.file.ends_with("insight.rs") && site.line == line, "{site}");
                }
                let [holder] = &snapshot.holders()[..] else { panic!("{snapshot}") };
                assert_eq!((holder.blocks, holder.bytes), (80, snapshot.stats.in_use));
                Ok(())
            })
            .unwrap();
        });
    }

    // PyTorch: test_memory_plots_history_context, _free_stack: what happened, in order, with who asked for it.
    1: fn the_past_is_recorded_in_order(gpus) {
        on_backings(|backing| {
            let pool = &limited(gpus, 1, backing, 16 * MIB).record_memory(true).build().unwrap();
            pool.run(|dev, _| {
                let from = dev.memory_snapshot().events.len();
                let own = bytes_of(dev, 5 * MIB)?;
                let other = bytes_of(dev, 300)?;
                let (at, there) = (own.address(), other.address());
                drop(own);
                thread::scope(|s| s.spawn(|| drop(other)).join()).unwrap();
                failure(bytes_of(dev, 20 * MIB));
                dev.trim()?;
                let snapshot = dev.memory_snapshot();
                assert_books(&snapshot);
                let events = &snapshot.events[from..];
                assert!(events.is_sorted_by_key(|event| event.micros));
                let when = |kind, address: Option<u64>| {
                    events
                        .iter()
                        .position(|e| e.kind == kind && address.is_none_or(|a| a == e.address))
                        .unwrap_or_else(|| panic!("no {kind:?} of {address:x?} in {events:#?}"))
                };
                let order = [
                    when(EventKind::Allocated, Some(at)),
                    when(EventKind::Allocated, Some(there)),
                    when(EventKind::Freed, Some(at)),
                    when(EventKind::FreedRemotely, Some(there)),
                ];
                assert!(order.is_sorted(), "{order:?}");
                assert!(when(EventKind::Mapped, None) < order[1] && when(EventKind::Unmapped, None) > order[2]);
                let refused = &events[when(EventKind::OutOfMemory, None)];
                assert_eq!(
                    (refused.bytes, refused.site.as_ref().map(|s| s.op.as_ref())),
                    (20 * MIB as u64, Some("uninit"))
                );
                let trimmed = &events[when(EventKind::Trimmed, None)];
                assert!(trimmed.bytes > 0, "{trimmed:?}");
                Ok(())
            })
            .unwrap();
        });
    }

    // PyTorch: test_memory_snapshot_skip_actions, and what it costs when it is off: nothing is written down.
    1: fn without_recording_there_is_the_present_only(gpus) {
        let pool = gpus.builder(1).record_memory(false).build().unwrap();
        pool.run(|dev, _| {
            let live = (0..10).map(|i| bytes_of(dev, i * 100 * KIB)).collect::<Result<Vec<_>, _>>()?;
            let snapshot = dev.memory_snapshot();
            assert_books(&snapshot);
            assert!(!snapshot.recorded && snapshot.events.is_empty());
            assert!(snapshot.blocks.iter().all(|block| block.site.is_none()));
            assert_eq!(snapshot.blocks.iter().filter(|b| b.state == BlockState::Live).count(), live.len());
            Ok(())
        })
        .unwrap();
    }

    // PyTorch: test_memory_plots: its viewer can draw a pool in the middle of its work, as it is and after each event.
    2: fn pytorchs_viewer_draws_several_devices(gpus) {
        let pool = gpus.builder(2).record_memory(true).build().unwrap();
        let held = pool
            .run(|dev, _| {
                let mut rng = Rng(5);
                let mut live = Vec::new();
                for _ in 0..200 {
                    live.push(bytes_of(dev, rng.size(20))?);
                    if live.len() > 20 {
                        live.swap_remove(rng.below(20));
                    }
                }
                Ok((live, dev.memory_snapshot()))
            })
            .unwrap();
        let snapshots: Vec<_> = held.iter().map(|(_, snapshot)| snapshot.clone()).collect();
        snapshots.iter().for_each(assert_books);
        #[cfg(feature = "insight")]
        viz::check(&snapshots);
        drop(held);
        assert_at_rest(&pool);
    }

    // TF: TestBinDebugInfo. Classes add up to the small blocks.
    1: fn classes_add_up(gpus) {
        gpus.run(1, |dev| {
            let live = (1..100).map(|i| bytes_of(dev, i * 999)).collect::<Result<Vec<_>, _>>()?;
            let snapshot = dev.memory_snapshot();
            let classes = snapshot.classes();
            assert_eq!(classes.classes.iter().map(|class| class.live).sum::<usize>(), live.len());
            let bytes: u64 = classes.classes.iter().map(|class| class.live as u64 * class.bytes).sum();
            assert_eq!(bytes, snapshot.stats.in_use);
            Ok::<_, Error>(())
        });
    }
}
