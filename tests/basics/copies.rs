//! Copies: between host and device, pageable and pinned, and between devices, directly and staged. Every size class,
//! odd offsets, and what may be done with both ends while a copy is under way.

use crate::{
    on_both,
    support::{self, all_are, bytes, failure, slow_add, slow_copy},
};
use gpu_pool::{AsViewMut, DeviceBuffer, Error, PinnedBuffer};
use parking_lot::Mutex;
use std::sync::Arc;

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// Around every boundary of the staging: packed, one piece (2 MiB), several, several threads (from 8 MiB on).
const SIZES: [usize; 17] = [
    0,
    1,
    2,
    3,
    255,
    257,
    4095,
    64 * KIB + 1,
    2 * MIB - 1,
    2 * MIB,
    2 * MIB + 1,
    4 * MIB + 3,
    8 * MIB - 1,
    8 * MIB,
    8 * MIB + 1,
    20 * MIB,
    20 * MIB + 7,
];

on_both! {
    1: fn there_and_back_in_every_size(gpus) {
        // One device: large slices are cut over several threads where there are cores.
        for devices in [1, gpus.up_to(2)] {
            let pool = gpus.pool(devices);
            let all = bytes(SIZES[16], 0x5a);
            pool.run(|dev, _| {
                for size in SIZES {
                    let x = dev.upload(&all[..size])?;
                    assert!(dev.download(&x)? == all[..size], "{size} bytes");
                    // Into memory that is there already, and out of a part of it.
                    let mut y = dev.zeros::<u8>(size + 5)?;
                    dev.upload_into(&all[..size], &mut y.slice_mut(3..3 + size))?;
                    let mut host = vec![1; size + 5];
                    dev.download_into(&y, &mut host)?;
                    assert!(host[..3] == [0; 3] && host[3..3 + size] == all[..size] && host[3 + size..] == [0; 2]);
                }
                Ok(())
            })
            .unwrap();
        }
    }

    // pytorch#127612: the host writes after a copy that does not wait, and the change leaks into the result.
    1: fn the_source_is_free_when_upload_returns(gpus) {
        gpus.run(1, |dev| {
            for size in [1, 1000, 300 * KIB, 2 * MIB, 9 * MIB] {
                let mut host = bytes(size, 1);
                let mut busy = dev.zeros::<u32>(4)?;
                slow_add(dev, &mut busy, 1, 20_000)?;
                let x = dev.upload(&host)?;
                host.fill(0xff);
                drop(host);
                assert!(dev.download(&x)? == bytes(size, 1), "{size} bytes");
            }
            Ok(())
        });
    }

    1: fn many_small_uploads_share_pieces(gpus) {
        gpus.run(1, |dev| {
            let (a, b) = (dev.stream()?, dev.stream()?);
            let streams = [&dev.on(&a), &dev.on(&b)];
            // More than both pieces hold, on two streams, one of them slow; with large ones in between.
            let mut busy = dev.zeros::<u32>(4)?;
            slow_add(streams[0], &mut busy, 1, 20_000)?;
            let mut all = Vec::new();
            for i in 0..3000usize {
                let host = bytes(1 + (i * 37) % 4000, i as u8);
                all.push(streams[i % 2].upload(&host)?);
                if i % 1000 == 500 {
                    all.push(dev.upload(&bytes(5 * MIB, i as u8))?);
                }
            }
            let mut next = all.iter();
            for i in 0..3000usize {
                let x = next.next().unwrap();
                assert!(dev.download(x)? == bytes(1 + (i * 37) % 4000, i as u8), "upload {i}");
                if i % 1000 == 500 {
                    assert!(dev.download(next.next().unwrap())? == bytes(5 * MIB, i as u8), "after {i}");
                }
            }
            Ok(())
        });
    }

    1: fn pinned_memory_waits_for_its_copies(gpus) {
        let pool = gpus.pool(1);
        let mut pinned = pool.pinned::<u32>(100_000).unwrap();
        assert!(!pinned.in_flight() && pinned.as_slice().unwrap().iter().all(|&x| x == 0));
        let parked = Mutex::new(&mut pinned);
        pool.run(|dev, _| {
            let pinned = &mut **parked.lock();
            for round in 0..3u32 {
                // From the host's write to the device,
                pinned.as_mut_slice()?.fill(round);
                let mut busy = dev.zeros::<u32>(4)?;
                slow_add(dev, &mut busy, 1, 20_000)?;
                let x = dev.upload_pinned(pinned)?;
                // which the next write does not overtake,
                pinned.as_mut_slice()?.fill(u32::MAX);
                assert!(all_are(&dev.download(&x)?, round));
                // and back, where reading waits.
                let mut y = dev.zeros::<u32>(100_000)?;
                slow_add(dev, &mut y, round + 7, 20_000)?;
                dev.download_pinned(&y, pinned)?;
                assert!(pinned.in_flight());
                assert!(pinned.as_slice()?.iter().all(|&x| x == round + 7));
                assert!(!pinned.in_flight());
            }
            Ok(())
        })
        .unwrap();
    }

    // pytorch#130785: 94 programs that free page-locked memory while a copy uses it.
    1: fn pinned_memory_is_dropped_in_flight(gpus) {
        gpus.run(1, |dev| {
            for round in 0..4u32 {
                let mut pinned = dev.pinned::<u32>(50_000)?;
                pinned.as_mut_slice()?.fill(round);
                let mut busy = dev.zeros::<u32>(4)?;
                slow_add(dev, &mut busy, 1, 20_000)?;
                let x = dev.upload_pinned(&pinned)?;
                drop(pinned);
                // The same memory, perhaps, for somebody else: zeroed, and only when the copy is over.
                let mut other = dev.pinned::<u32>(50_000)?;
                assert!(other.as_slice()?.iter().all(|&x| x == 0));
                other.as_mut_slice()?.fill(u32::MAX);
                assert!(all_are(&dev.download(&x)?, round));
            }
            Ok(())
        });
    }

    // The staging pieces are page-locked memory of the same pool, and 2 MiB each.
    1: fn pinned_memory_dropped_in_flight_does_not_become_a_staging_piece(gpus) {
        for staged_copy in [false, true] {
            let n = if staged_copy { gpus.up_to(2) } else { 1 };
            let pool = gpus.staged(n);
            let len = if staged_copy { MIB } else { MIB / 2 };
            pool.run(|dev, _| {
                let mut pinned = [dev.pinned::<u32>(len)?, dev.pinned::<u32>(len)?];
                for buffer in &mut pinned {
                    buffer.as_mut_slice()?.fill(5);
                }
                let (mut busy, mut x) = (dev.zeros::<u32>(4)?, [dev.zeros::<u32>(len)?, dev.zeros::<u32>(len)?]);
                slow_add(dev, &mut busy, 1, 60_000)?;
                for (buffer, x) in pinned.iter().zip(&mut x) {
                    dev.upload_pinned_into(buffer, x)?;
                }
                drop(pinned);
                // The first transfer of its kind: it makes its staging memory now. On other streams than the copies
                // above.
                let other = dev.stream()?;
                let on = dev.on(&other);
                let (first, second) = (on.upload(&[9u32; MIB / 2])?, on.upload(&[8u32; MIB / 2])?);
                let theirs = dev.exchange(Arc::new(first))?[(dev.rank() + 1) % n].clone();
                let here = theirs.copy_to(&on)?;
                dev.barrier()?;
                assert!(all_are(&on.download(&here)?, 9) && all_are(&on.download(&second)?, 8));
                for x in &x {
                    assert!(all_are(&dev.download(x)?, 5), "a transfer was overwritten before it ran");
                }
                Ok(())
            })
            .unwrap();
        }
    }

    1: fn pinned_memory_is_every_devices(gpus) {
        let n = gpus.up_to(4);
        let pool = gpus.pool(n);
        let mut batch = pool.pinned::<f32>(1000).unwrap();
        batch.as_mut_slice().unwrap().fill(2.0);
        let out: Vec<Mutex<PinnedBuffer<f32>>> = (0..n).map(|_| Mutex::new(pool.pinned(1000).unwrap())).collect();
        pool.run(|dev, _| {
            let mut x = dev.upload_pinned(&batch)?;
            dev.scale(&mut x, dev.index() as f32)?;
            dev.download_pinned(&x, &mut *out[dev.index()].lock())
        })
        .unwrap();
        for (i, out) in out.iter().enumerate() {
            assert_eq!(out.lock().as_slice().unwrap(), [2.0 * i as f32; 1000]);
        }
    }

    // candle#3524, cudarc#559: copies between contexts that fail or are not ordered. Pull, push, and in one's own
    // memory.
    2: fn between_devices_in_every_size_and_at_odd_offsets(gpus) {
        for staged in [false, true] {
            let pool = if staged { gpus.staged(2) } else { gpus.pool(2) };
            let all = bytes(SIZES[16] + 16, 0xc3);
            let source = pool.on(&[0]).run(|dev, _| dev.upload(&all)).unwrap().remove(0);
            for size in SIZES {
                for (from, to) in [(0, 0), (3, 5)] {
                    if size > 9 * MIB && from == 0 {
                        continue;
                    }
                    let part = source.slice(from..from + size);
                    assert_eq!(part.len(), size);
                    let mut there = pool.on(&[1]).run(|dev, _| dev.zeros::<u8>(size + 9)).unwrap().remove(0);
                    let expected = [&vec![0; to], &all[from..from + size], &vec![0; 9 - to]].concat();
                    for pull in [true, false] {
                        let target = Mutex::new(&mut there);
                        pool.on(&[usize::from(pull)]).run(|dev, _| {
                            dev.copy(
                                &source.peer().slice(from..from + size),
                                &mut target.lock().slice_mut(to..to + size),
                            )
                        })
                        .unwrap();
                        let seen = pool.on(&[1]).run(|dev, _| dev.download(&there)).unwrap().remove(0);
                        assert!(seen == expected, "{size} bytes from {from} to {to}, staged: {staged}, pull: {pull}");
                        let target = Mutex::new(&mut there);
                        pool.on(&[1]).run(|dev, _| dev.fill(&mut **target.lock(), 0)).unwrap();
                    }
                }
            }
        }
    }

    2: fn all_pairs_at_once(gpus) {
        for staged in [false, true] {
            let n = gpus.up_to(4);
            let pool = if staged { gpus.staged(n) } else { gpus.pool(n) };
            for size in [1000, 5 * MIB + 1] {
                let found = pool.run(|dev, _| {
                    let mine = Arc::new(dev.upload(&bytes(size, dev.rank() as u8))?);
                    let all = dev.exchange(mine)?;
                    let copies: Vec<DeviceBuffer<u8>> = all.iter().map(|x| x.copy_to(dev)).collect::<Result<_, _>>()?;
                    // Each on a stream of its own as well.
                    let streams: Vec<_> = (0..n).map(|_| dev.stream()).collect::<Result<_, _>>()?;
                    let again: Vec<DeviceBuffer<u8>> =
                        all.iter().zip(&streams).map(|(x, s)| x.copy_to(&dev.on(s))).collect::<Result<_, _>>()?;
                    copies.iter().chain(&again).map(|x| dev.download(x)).collect::<Result<Vec<_>, _>>()
                });
                for copies in found.unwrap() {
                    for (i, copy) in copies.into_iter().enumerate() {
                        assert!(copy == bytes(size, (i % n) as u8), "copy {i} of {size} bytes, staged: {staged}");
                    }
                }
            }
        }
    }

    // Copies are ordered on both sides: with what was asked before and after, of either device.
    2: fn a_copy_is_ordered_on_both_sides(gpus) {
        for staged in [false, true] {
            let pool = if staged { gpus.staged(2) } else { gpus.pool(2) };
            for pull in [true, false] {
                let [a, b] =
                    [0, 1].map(|d| Mutex::new(pool.on(&[d]).run(|dev, _| dev.zeros::<u32>(3000)).unwrap().remove(0)));
                let seen = pool.run(|dev, _| {
                    let me = dev.rank();
                    // The source is written slowly, the destination too.
                    slow_add(dev, &mut *if me == 0 { &a } else { &b }.lock(), 10 + me as u32, 15_000)?;
                    dev.barrier()?;
                    if (me == 1) == pull {
                        dev.copy(&a.lock().peer(), &mut *b.lock())?;
                    }
                    dev.barrier()?;
                    // Both are changed at once.
                    slow_add(dev, &mut *if me == 0 { &a } else { &b }.lock(), 100, 0)?;
                    dev.download(&*if me == 0 { &a } else { &b }.lock())
                });
                assert_eq!(seen.unwrap(), [vec![110; 3000], vec![110; 3000]], "staged: {staged}, pull: {pull}");
            }
        }
    }

    1: fn unified_memory_is_seen_by_host_and_devices(gpus) {
        let n = gpus.up_to(3);
        let pool = gpus.pool(n);
        let mut table = pool.unified::<u32>(n * 1000).unwrap();
        assert!(table.as_slice().unwrap().iter().all(|&x| x == 0));
        for round in 1..4 {
            table.as_mut_slice().unwrap().fill(round);
            pool.with(table.rows_mut(1000)).run(|dev, _, mut rows| {
                slow_add(dev, &mut rows, 10 * (dev.rank() as u32 + 1), 5_000)?;
                // To and from a device's own memory, pageable and page-locked.
                let mut x = dev.zeros::<u32>(1000)?;
                dev.copy(&rows, &mut x)?;
                slow_add(dev, &mut x, 1, 0)?;
                dev.copy(&x, &mut rows)?;
                let (left, mut right) = rows.split_at_mut(500);
                assert_eq!(dev.download(&left)?, vec![round + 10 * (dev.rank() as u32 + 1) + 1; 500]);
                dev.upload_into(&[0; 500], &mut right)
            })
            .unwrap();
            for (rank, rows) in table.as_slice().unwrap().chunks(1000).enumerate() {
                assert_eq!(rows[..500], vec![round + 10 * (rank as u32 + 1) + 1; 500]);
                assert_eq!(rows[500..], [0; 500]);
            }
        }
    }

    // By a shared borrow: the host may read meanwhile, and the same rows go out twice.
    1: fn unified_memory_is_read_by_devices_and_host_at_once(gpus) {
        let n = gpus.up_to(3);
        let pool = gpus.pool(n);
        let mut table = pool.unified::<u32>(n * 1000 + 1000).unwrap();
        table.as_mut_slice().unwrap().iter_mut().zip(0..).for_each(|(x, i)| *x = i);
        let seen = pool.with((table.rows(1000), table.rows(500))).run(|dev, shard, (rows, again)| {
            let mut x = dev.zeros::<u32>(rows.len())?;
            slow_copy(dev, &rows, &mut x, 5_000)?;
            let first = 1000 * shard.range(n + 1).start as u32;
            assert_eq!(table.as_slice()?[first as usize], first);
            assert_eq!(dev.download(&rows.slice(..1))?, [first]);
            assert_eq!(dev.download(&x)?, (first..).take(rows.len()).collect::<Vec<_>>());
            Ok((rows.len(), again.len() == 500 * shard.range(2 * n + 2).len()))
        });
        let seen = seen.unwrap();
        assert_eq!(seen.iter().map(|(len, _)| len).sum::<usize>(), n * 1000 + 1000);
        assert!(seen.iter().all(|(_, right)| *right));
        for width in [0, 7] {
            let error = failure(pool.with(table.rows(width)).run(|_, _, _| Ok(())));
            assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
        }
        table.as_mut_slice().unwrap().fill(0);
    }

    // What is read of it has landed, as all of it has.
    1: fn a_part_of_page_locked_memory_waits_for_the_copy(gpus) {
        let pool = gpus.pool(1);
        let mut host = pool.pinned::<u32>(1000).unwrap();
        pool.with(vec![&mut host]).run(|dev, _, host| {
            let mut x = dev.zeros::<u32>(1000)?;
            for round in 1..4 {
                slow_add(dev, &mut x, 1, 20_000)?;
                dev.download_pinned(&x, host)?;
                assert_eq!(host.slice(10..12)?, [round; 2]);
                assert_eq!((host.slice(..)?.len(), host.slice(..=9)?.len(), host.slice(1000..)?.len()), (1000, 10, 0));
            }
            Ok(())
        })
        .unwrap();
        let beyond = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| host.slice(999..1001).map(<[u32]>::len)));
        assert!(beyond.is_err());
    }

    // Parts go each way by themselves, and touch no neighbour.
    1: fn parts_of_page_locked_memory_are_copied(gpus) {
        let pool = gpus.pool(1);
        let (mut from, mut to) = (pool.pinned::<u32>(1000).unwrap(), pool.pinned::<u32>(1000).unwrap());
        from.as_mut_slice().unwrap().iter_mut().zip(0..).for_each(|(x, i)| *x = i);
        let mut expected = vec![0; 1000];
        let copied = pool.on_device(0).run(|dev| {
            for (a, len, b) in [(0, 1000, 0), (3, 0, 1000), (999, 1, 0), (17, 300, 555), (0, 500, 500)] {
                let x = dev.upload_pinned(&from.range(a..a + len))?;
                let mut y = dev.zeros::<u32>(len)?;
                dev.upload_pinned_into(&from.range(a..a + len), &mut y)?;
                let mut part = to.range_mut(b..b + len);
                dev.download_pinned(&y, &mut part)?;
                dev.download_pinned(&x, &mut part)?;
                assert_eq!((part.len(), part.is_empty()), (len, len == 0));
                expected[b..b + len].copy_from_slice(&from.as_slice()?[a..a + len]);
                assert_eq!(to.as_slice()?, expected);
            }
            let error = failure(dev.upload_pinned_into(&from.range(1..), &mut dev.zeros::<u32>(1000)?));
            assert!(matches!(error, Error::InvalidArgument { op: "upload_pinned_into", .. }), "{error}");
            Ok(())
        });
        copied.unwrap();
        let beyond = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| from.range(999..1001).len()));
        assert!(beyond.is_err());
    }

    1: fn copy_to_makes_a_buffer_of_ones_own(gpus) {
        let n = gpus.up_to(2);
        let pool = gpus.pool(n);
        let x = pool.on(&[0]).run(|dev, _| dev.upload(&bytes(777, 9))).unwrap().remove(0);
        let copies = pool.run(|dev, _| x.copy_to(dev)).unwrap();
        let devices: Vec<usize> = copies.iter().map(DeviceBuffer::device).collect();
        assert_eq!(devices, (0..n).collect::<Vec<_>>());
        drop(x);
        assert!(pool.run(|dev, _| dev.download(&copies[dev.index()])).unwrap().iter().all(|x| *x == bytes(777, 9)));
    }

    // Kernels name peers' memory only where the pair was verified to deliver.
    2: fn kernels_on_peers_memory_need_a_direct_route(gpus) {
        let (direct, staged) = (gpus.pool(2), gpus.staged(2));
        let launch = |pool: &gpu_pool::GpuPool| {
            let theirs = pool.on(&[0]).run(|dev, _| dev.upload(&[4u32; 50])).unwrap().remove(0);
            pool.on(&[1]).run(|dev, _| {
                let mut y = dev.zeros::<u32>(50)?;
                let dims = gpu_pool::LaunchDims::cover(50);
                // SAFETY: the kernel fits its signature and touches the first 50 elements of each.
                unsafe { dev.launch(&support::SLOW_COPY, dims, (theirs.peer(), &mut y, 50u64, 0u32)) }?;
                dev.download(&y)
            })
        };
        let error = failure(launch(&staged));
        assert!(matches!(error, Error::PeerDenied { device: 1, peer: 0, op: "launch", .. }), "{error}");
        if direct.report().peer(1, 0).route == gpu_pool::collective::Route::Direct {
            assert_eq!(launch(&direct).unwrap(), [[4; 50]]);
        } else {
            println!("skipped: no direct route from device 1 to device 0");
        }
    }

    1: fn fills_of_every_element_size(gpus) {
        gpus.run(1, |dev| {
            macro_rules! check {
                ($($v:expr),+) => {$({
                    let mut x = dev.zeros(1001)?;
                    dev.fill(&mut x.slice_mut(1..1000), $v)?;
                    let host = dev.download(&x)?;
                    assert!(host[1..1000].iter().all(|&x| x == $v) && host[0] != $v && host[1000] != $v);
                })+};
            }
            check!(7u8, -3i8, 0x1234u16, 1.5f32, 0xdead_beefu32, 2.25f64, 0x0123_4567_89ab_cdefu64);
            let error = failure(dev.fill(&mut dev.zeros::<[u8; 3]>(4)?.view_mut(), [1, 2, 3]));
            assert!(matches!(error, Error::InvalidArgument { op: "fill", .. }), "{error}");
            Ok(())
        });
    }
}
