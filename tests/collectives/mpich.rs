//! MPICH's `test/mpi/coll`, as far as it applies: what the data there looks like, not its code.

use crate::{
    on_both, rig,
    rig::{WAYS, ways},
};
use gpu_pool::{AsView, AsViewMut, Device, Error, ReduceOp};

fn upload_ramp(dev: &Device, len: usize, from: usize) -> Result<gpu_pool::DeviceBuffer<i32>, Error> {
    dev.upload(&(from as i32..(from + len) as i32).collect::<Vec<_>>())
}

/// `r + 1` elements of member `r`, and where they begin.
fn growing(n: usize) -> (Vec<usize>, impl Fn(usize) -> usize) {
    ((1..=n).collect(), |rank| rank * (rank + 1) / 2)
}

on_both! {
    // allred2, allred5: in place and out of place, counts that double, below and above the number of members.
    2: fn allred2_and_allred5(gpus) {
        let n = gpus.up_to(5);
        for way in WAYS {
            way.pool(gpus, n).run(|dev, _| {
                for count in (0..14).map(|k| 1usize << k) {
                    let (mut x, mut y) = (upload_ramp(dev, count, 0)?, dev.zeros::<i32>(count)?);
                    dev.all_reduce_into(&x, &mut y, ReduceOp::Sum)?;
                    dev.all_reduce(&mut x, ReduceOp::Sum)?;
                    let expected: Vec<i32> = (0..count).map(|i| (n * i) as i32).collect();
                    assert!(dev.download(&x)? == expected && dev.download(&y)? == expected, "{way:?}, {count}");
                }
                Ok(())
            })
            .unwrap();
        }
    }

    // allredmany: so many that a library that is late with freeing its requests runs out.
    2: fn allredmany(gpus) {
        let n = gpus.up_to(3);
        let found = rig::pool(gpus, n).run(|dev, _| {
            let one = dev.upload(&[1u32])?;
            let mut sums = dev.zeros::<u32>(1000)?;
            for k in 0..1000 {
                dev.all_reduce_into(&one, &mut sums.slice_mut(k..k + 1), ReduceOp::Sum)?;
            }
            dev.download(&sums)
        });
        assert_eq!(found.unwrap(), vec![vec![n as u32; 1000]; n]);
    }

    // bcasttest, bcast_full: every root, lengths that double, so that every algorithm has its turn.
    2: fn bcasttest(gpus) {
        let n = gpus.up_to(4);
        for way in WAYS {
            way.pool(gpus, n)
                .run(|dev, _| {
                    for root in 0..n {
                        for count in [1, 64, 4096, 65536] {
                            let mut x = match dev.rank() == root {
                                true => upload_ramp(dev, count, root)?,
                                false => dev.zeros::<i32>(count)?,
                            };
                            dev.broadcast(&mut x, root)?;
                            let found = dev.download(&x)?;
                            assert!(
                                found.iter().enumerate().all(|(i, x)| *x == (root + i) as i32),
                                "{way:?}, {count} of {root}"
                            );
                        }
                    }
                    Ok(())
                })
                .unwrap();
        }
    }

    // coll2, coll7, allgather2, allgather3: rows of a table, in place and not.
    2: fn coll2_allgather_rows(gpus) {
        let n = gpus.up_to(5);
        let found = rig::pool(gpus, n).run(|dev, _| {
            let (width, me) = (37, dev.rank());
            let (mut a, mut b) = (dev.zeros::<i32>(n * width)?, dev.zeros::<i32>(n * width)?);
            let row = upload_ramp(dev, width, me * width)?;
            dev.all_gather(&row, &mut a)?;
            dev.copy(&row, &mut b.slice_mut(me * width..(me + 1) * width))?;
            dev.all_gather_in_place(&mut b)?;
            Ok((dev.download(&a)?, dev.download(&b)?))
        });
        let whole: Vec<i32> = (0..n as i32 * 37).collect();
        assert_eq!(found.unwrap(), vec![(whole.clone(), whole); n]);
    }

    // coll3, coll6, allgatherv2, allgatherv3: each a piece longer than the one before.
    2: fn allgatherv_of_growing_pieces(gpus) {
        let n = gpus.up_to(6);
        let (counts, start) = growing(n);
        let found = rig::pool(gpus, n).run(|dev, _| {
            let mut all = dev.zeros::<i32>(n * (n + 1) / 2)?;
            dev.all_gather_v(&upload_ramp(dev, dev.rank() + 1, start(dev.rank()))?, &mut all, &counts)?;
            dev.download(&all)
        });
        let whole: Vec<i32> = (0..(n * (n + 1) / 2) as i32).collect();
        assert_eq!(found.unwrap(), vec![whole; n]);
    }

    // allgatherv4: one member has nearly everything, or every other one nothing.
    2: fn allgatherv_of_very_uneven_pieces(gpus) {
        let n = gpus.up_to(4);
        for way in WAYS {
            for counts in [
                (0..n).map(|r| if r == 0 { 60_000 } else { 1 }).collect::<Vec<_>>(),
                (0..n).map(|r| if r == n - 1 { 60_000 } else { 0 }).collect(),
                (0..n).map(|r| r % 2 * 1001).collect(),
                vec![0; n],
            ] {
                let total: usize = counts.iter().sum();
                let found = way.pool(gpus, n).run(|dev, _| {
                    let start = counts[..dev.rank()].iter().sum();
                    let mut all = dev.zeros::<i32>(total)?;
                    dev.all_gather_v(&upload_ramp(dev, counts[dev.rank()], start)?, &mut all, &counts)?;
                    dev.download(&all)
                });
                assert!(
                    found.unwrap().iter().all(|x| x.iter().enumerate().all(|(i, x)| *x == i as i32)),
                    "{way:?}, {counts:?}"
                );
            }
        }
    }

    // coll4, coll5, scatter2, scatter3, scattern, scatterv: rows of a table, and pieces of other lengths.
    2: fn scatterv(gpus) {
        let n = gpus.up_to(5);
        let (counts, start) = growing(n);
        let pool = rig::pool(gpus, n);
        for root in 0..n {
            let found = pool.run(|dev, _| {
                let all = (dev.rank() == root).then(|| upload_ramp(dev, n * (n + 1) / 2, 0)).transpose()?;
                let mut piece = dev.zeros::<i32>(dev.rank() + 1)?;
                dev.scatter_v(all.as_ref().map(|all| all.view()), &mut piece, &counts, root)?;
                dev.download(&piece)
            });
            let piece = |r: usize| (start(r) as i32..(start(r) + r + 1) as i32).collect::<Vec<_>>();
            assert_eq!(found.unwrap(), (0..n).map(piece).collect::<Vec<_>>());
        }
    }

    // gather, gather2, gatherv.
    2: fn gatherv(gpus) {
        let n = gpus.up_to(5);
        let (counts, start) = growing(n);
        let pool = rig::pool(gpus, n);
        for root in 0..n {
            let found = pool.run(|dev, _| {
                let piece = upload_ramp(dev, dev.rank() + 1, start(dev.rank()))?;
                let mut all = (dev.rank() == root).then(|| dev.zeros::<i32>(n * (n + 1) / 2)).transpose()?;
                dev.gather_v(&piece, all.as_mut().map(|all| all.view_mut()), &counts, root)?;
                all.map(|all| dev.download(&all)).transpose()
            });
            for (rank, all) in found.unwrap().into_iter().enumerate() {
                let whole = (rank == root).then(|| (0..(n * (n + 1) / 2) as i32).collect::<Vec<_>>());
                assert_eq!(all, whole);
            }
        }
    }

    // gather_big: more at the root than a piece of a staged copy.
    2: fn gather_big(gpus) {
        let n = gpus.up_to(3);
        let each = 1_500_007;
        for staged in [false, true] {
            let pool = if staged { gpus.staged(n) } else { rig::pool(gpus, n) };
            let found = pool.run(|dev, _| {
                let mut own = dev.zeros::<u8>(each)?;
                dev.fill(&mut own, dev.rank() as u8 + 1)?;
                let mut all = (dev.rank() == 1).then(|| dev.zeros::<u8>(n * each)).transpose()?;
                dev.gather(&own, all.as_mut().map(|all| all.view_mut()), 1)?;
                all.map(|all| dev.download(&all)).transpose()
            });
            let all = found.unwrap().swap_remove(1).unwrap();
            assert!(all.chunks(each).enumerate().all(|(r, x)| x.iter().all(|x| *x == r as u8 + 1)));
        }
    }

    // coll13, alltoall1.
    2: fn alltoall(gpus) {
        let n = gpus.up_to(5);
        let found = rig::pool(gpus, n).run(|dev, _| {
            let (x, mut y) = (upload_ramp(dev, n * 100, 1000 * dev.rank())?, dev.zeros::<i32>(n * 100)?);
            dev.all_to_all(&x, &mut y)?;
            dev.download(&y)
        });
        for (me, y) in found.unwrap().into_iter().enumerate() {
            let expected: Vec<i32> =
                (0..n).flat_map(|a| (0..100).map(move |i| (1000 * a + 100 * me + i) as i32)).collect();
            assert_eq!(y, expected);
        }
    }

    // alltoallv, alltoallv0, alltoallw_zeros: only with neighbours, only one way, with nobody, and as much as one's
    // rank.
    2: fn alltoallv(gpus) {
        let n = gpus.up_to(5);
        type Counts = fn(usize, usize, usize) -> usize;
        let patterns: [(&str, Counts); 5] = [
            ("neighbours", |from, to, n| if (from + 1) % n == to || (to + 1) % n == from { 50 } else { 0 }),
            ("upwards", |from, to, _| if to == from + 1 { 77 } else { 0 }),
            ("nobody", |_, _, _| 0),
            ("by rank", |from, to, _| from * 3 + to),
            ("with oneself", |from, to, _| if from == to { 9 } else { 0 }),
        ];
        for (way, pool) in ways(gpus, n) {
            for (name, sent) in patterns {
                let found = pool.run(|dev, _| {
                    let me = dev.rank();
                    let send: Vec<usize> = (0..n).map(|to| sent(me, to, n)).collect();
                    let receive: Vec<usize> = (0..n).map(|from| sent(from, me, n)).collect();
                    let own: Vec<u32> = (0..n).flat_map(|to| vec![(100 * me + to) as u32; send[to]]).collect();
                    let mut y = dev.zeros::<u32>(receive.iter().sum())?;
                    dev.all_to_all_v(&dev.upload(&own)?, &send, &mut y, &receive)?;
                    dev.download(&y)
                });
                for (me, y) in found.unwrap().into_iter().enumerate() {
                    let expected: Vec<u32> =
                        (0..n).flat_map(|from| vec![(100 * from + me) as u32; sent(from, me, n)]).collect();
                    assert_eq!(y, expected, "{way:?}, {name}");
                }
            }
        }
    }

    // redscat, redscat3, redscatbk3, red_scat_block(2).
    2: fn redscat(gpus) {
        let n = gpus.up_to(5);
        for way in WAYS {
            way.pool(gpus, n)
                .run(|dev, _| {
                    let me = dev.rank();
                    // Pieces by rank, none for the first.
                    let counts: Vec<usize> = (0..n).map(|r| 500 * r).collect();
                    let total: usize = counts.iter().sum();
                    let (x, mut mine) = (upload_ramp(dev, total, me)?, dev.zeros::<i32>(counts[me])?);
                    dev.reduce_scatter_v(&x, &mut mine, &counts, ReduceOp::Sum)?;
                    let start: usize = counts[..me].iter().sum();
                    let of_all = n * (n - 1) / 2;
                    let expected =
                        |start: usize, len| (start..start + len).map(|i| (n * i + of_all) as i32).collect::<Vec<_>>();
                    assert_eq!(dev.download(&mine)?, expected(start, counts[me]), "{way:?}");
                    // Blocks, in place and not.
                    for block in [1, 33, 1024] {
                        let (mut x, mut mine) = (upload_ramp(dev, n * block, me)?, dev.zeros::<i32>(block)?);
                        dev.reduce_scatter(&x, &mut mine, ReduceOp::Sum)?;
                        dev.reduce_scatter_in_place(&mut x, ReduceOp::Sum)?;
                        assert_eq!(dev.download(&mine)?, expected(me * block, block), "{way:?}");
                        let own = me * block..(me + 1) * block;
                        assert_eq!(dev.download(&x.slice(own.clone()))?, expected(me * block, block), "{way:?}");
                        let whole = dev.download(&x)?;
                        assert!(
                            (0..n * block).all(|i| own.contains(&i) || whole[i] == (i + me) as i32),
                            "others' parts stay"
                        );
                    }
                    Ok(())
                })
                .unwrap();
        }
    }

    // reduce, red3, red4, coll8: reductions to each root in turn while the others go on.
    2: fn reductions_to_every_root_in_a_row(gpus) {
        let n = gpus.up_to(5);
        let found = rig::pool(gpus, n).run(|dev, _| {
            let mut all = (0..n).map(|_| dev.upload(&vec![dev.rank() as i64 + 1; 500])).collect::<Result<Vec<_>, _>>()?;
            for (root, x) in all.iter_mut().enumerate() {
                dev.reduce(x, ReduceOp::Prod, root)?;
            }
            all.iter().map(|x| Ok(dev.download(x)?[499])).collect::<Result<Vec<i64>, Error>>()
        });
        let product: i64 = (1..=n as i64).product();
        for (rank, found) in found.unwrap().into_iter().enumerate() {
            let expected: Vec<i64> = (0..n).map(|root| if root == rank { product } else { rank as i64 + 1 }).collect();
            assert_eq!(found, expected);
        }
    }

    // iallred, ibarrier, nonblocking 1 to 4, nbcoll2, nballtoall1: all kinds under way at once, on streams of their
    // own.
    2: fn nonblocking(gpus) {
        let n = gpus.up_to(4);
        for way in WAYS {
            let found = way.pool(gpus, n).run(|dev, _| {
                let me = dev.rank() as i32;
                let streams = (0..4).map(|_| dev.stream()).collect::<Result<Vec<_>, _>>()?;
                let mut sum = dev.upload(&vec![me; 2000])?;
                let mut bcast = dev.upload(&vec![me; 2000])?;
                let own = dev.upload(&vec![me; 100 * n])?;
                let (mut all, mut swapped) = (dev.zeros::<i32>(100 * n * n)?, dev.zeros::<i32>(100 * n)?);
                dev.on(&streams[0]).all_reduce(&mut sum, ReduceOp::Sum)?;
                dev.on(&streams[1]).broadcast(&mut bcast, 1)?;
                dev.on(&streams[2]).all_gather(&own, &mut all)?;
                dev.barrier()?;
                dev.on(&streams[3]).all_to_all(&own, &mut swapped)?;
                Ok([dev.download(&sum)?, dev.download(&bcast)?, dev.download(&all)?, dev.download(&swapped)?])
            });
            for [sum, bcast, all, swapped] in found.unwrap() {
                assert_eq!(sum, vec![(n * (n - 1) / 2) as i32; 2000], "{way:?}");
                assert_eq!(bcast, vec![1; 2000], "{way:?}");
                assert!(all.iter().enumerate().all(|(i, x)| *x == (i / (100 * n)) as i32), "{way:?}");
                assert!(swapped.iter().enumerate().all(|(i, x)| *x == (i / 100) as i32), "{way:?}");
            }
        }
    }
}
