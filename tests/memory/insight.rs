//! What people see of a pool: snapshots, stats, call sites, pictures. (PyTorch `test_memory_snapshot*`,
//! `test_memory_plots*`, `_check_memory_stat_consistency`; TensorFlow `TestBinDebugInfo`; RMM `DumpLogOnFailure`.)

use crate::{
    on_both,
    rig::{KIB, MIB, Rng, assert_at_rest, assert_books, bytes_of, limited, on_backings},
    support::failure,
};
use gpu_pool::{BlockState, DeviceBuffer, Error, EventKind};
use std::{panic::Location, thread};

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

    // PyTorch: test_memory_plots: the page of a pool in the middle of its work holds what the pool's snapshots say.
    2: fn a_page_of_several_devices_stands_by_itself(gpus) {
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
        {
            use gpu_pool::MemorySnapshot;
            let page = MemorySnapshot::page(&snapshots);
            assert!(page.starts_with("<!doctype html>") && page.contains("insight.rs"));
            assert!(!page.contains("http://"), "it needs nothing from elsewhere");
            let (_, json) = page.split_once("id=\"snapshots\">").unwrap();
            let shown: Vec<MemorySnapshot> = serde_json::from_str(json.split_once("</script").unwrap().0).unwrap();
            assert_eq!(shown, snapshots);
            for snapshot in &snapshots {
                assert_eq!(MemorySnapshot::from_json(&snapshot.to_json()).unwrap(), *snapshot);
            }
        }
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
