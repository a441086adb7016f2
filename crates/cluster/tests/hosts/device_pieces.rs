//! Large buffers over rails between devices, which go in pieces beside the steps inside the processes
//! (`loopback`). Other tests of rails cut, too: a piece has 4 KiB there.

use super::{internals::*, numbers, part, sums};
use crate::loopback::{
    Hosts,
    device_mail::{Held, PIECE},
};
use gpu_pool::extend::cluster::memory::Access;
use gpu_pool::{DType, Error, ReduceOp, error::Kind};
use gpu_pool_cluster::extend::{MOST_PIECES as MOST, Rule, broken};
use gpu_pool_lab::{Check, prelude::*};
use parking_lot::Mutex;
use proptest::prelude::*;
use std::{
    collections::HashMap,
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

fn some(rank: usize, len: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 7 + rank * 13) % 1021) as f32 / 3.0 - 100.0).collect()
}

/// The bits of all collectives that are cut.
fn bits(hosts: &Hosts, n: usize, len: usize) -> Vec<Vec<u32>> {
    let counts: Vec<usize> = (0..n).map(|k| if k == 1 { 0 } else { len / n + k }).collect();
    let total = counts.iter().sum::<usize>();
    hosts.all(|dev| {
        let world = dev.world()?;
        let me = world.rank();
        let mut all = Vec::new();
        // A maximum, and sums in the order of processes: of halves, with a mean, with factors, of more members' zeros.
        let mut sum = dev.upload(&some(me, total))?;
        world.all_reduce(&mut sum, ReduceOp::Avg)?;
        all.extend(dev.download(&sum)?);
        world.all_reduce(&mut sum, ReduceOp::Scaled(0.3 + me as f64))?;
        all.extend(dev.download(&sum)?);
        let (source, mut into) = (dev.upload(&some(me, total))?, dev.zeros::<f32>(total)?);
        world.all_reduce_into(&source, &mut into, ReduceOp::Max)?;
        all.extend(dev.download(&into)?);
        let halves: Vec<half::bf16> = some(me, total).into_iter().map(half::bf16::from_f32).collect();
        let mut halves = dev.upload(&halves)?;
        world.all_reduce(&mut halves, ReduceOp::Sum)?;
        all.extend(dev.download(&halves)?.into_iter().map(half::bf16::to_f32));
        let mut own = dev.zeros(counts[me])?;
        world.reduce_scatter_v(&source, &mut own, &counts, ReduceOp::Sum)?;
        let mut gathered = dev.zeros(total)?;
        world.all_gather_v(&own, &mut gathered, &counts)?;
        all.extend(dev.download(&gathered)?);
        world.broadcast(&mut gathered, n - 1)?;
        Ok(all.into_iter().map(f32::to_bits).collect())
    })
}

#[test]
fn pieces_have_the_bits_of_the_whole() {
    for shape in [&[2, 2][..], &[2, 3], &[1, 2], &[2, 1, 2]] {
        let (hosts, n) = (Hosts::on_devices(shape), shape.iter().sum::<usize>());
        for len in [1, 5000, 30_011] {
            let cut = bits(&hosts, n, len);
            let before: Vec<_> = hosts.mails.iter().map(|mail| mail.overlap.lock().take()).collect();
            let whole = bits(&hosts, n, len);
            hosts.mails.iter().zip(before).for_each(|(mail, before)| *mail.overlap.lock() = before);
            assert!(cut == whole, "{shape:?} {len}");
            assert!(cut.iter().all(|bits| *bits == cut[0]));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]
    #[test]
    fn any_shape_adds_up_in_pieces(
        shape in prop::collection::vec(1usize..4, 2..4),
        len in 2000usize..20_000,
        root in 0usize..9,
    ) {
        let (hosts, n) = (Hosts::on_devices(&shape), shape.iter().sum::<usize>());
        let counts: Vec<usize> = (0..n).map(|k| (len * (k + 1) / n) % 7001).collect();
        let total = counts.iter().sum();
        let found = hosts.all(|dev| {
            let world = dev.world()?;
            let mut x = dev.upload(&numbers(world.rank(), total))?;
            world.all_reduce(&mut x, ReduceOp::Sum)?;
            let (source, mut own) = (dev.upload(&numbers(world.rank(), total))?, dev.zeros(counts[world.rank()])?);
            world.reduce_scatter_v(&source, &mut own, &counts, ReduceOp::Sum)?;
            let mut told = dev.upload(&numbers(world.rank(), total))?;
            world.broadcast(&mut told, root % n)?;
            Ok((dev.download(&x)?, dev.download(&own)?, dev.download(&told)?))
        });
        for (me, (x, own, told)) in found.into_iter().enumerate() {
            prop_assert!(x == sums(n, total) && own == sums(n, total)[part(&counts, me)]);
            prop_assert!(told == numbers(root % n, total));
        }
    }
}

/// Elements of which each of two rails has so many pieces.
fn of_pieces(pieces: usize) -> usize {
    2 * pieces * PIECE / 4
}

#[test]
fn pieces_are_told() {
    let hosts = Hosts::on_devices(&[2, 2]);
    let found = hosts.all(|dev| {
        let world = dev.world()?;
        let how = |pieces| world.explain(DType::F32, ReduceOp::Sum, of_pieces(pieces) * 4);
        let text = how(3)?.to_string();
        assert!(text.contains("3 pieces of up to 4096 bytes, beside the steps inside, added up by"), "{text}");
        let rails = |pieces| Ok::<_, Error>(how(pieces)?.rails.unwrap());
        let (one, many) = (rails(1)?, rails(10 * MOST)?);
        assert_eq!((one.pieces, one.overlap, many.piece), (1, false, 10 * PIECE));
        Ok(many.pieces)
    });
    assert_eq!(found, [MOST; 4]);
    // Both processes cut, if one of them has something to overlap.
    let hosts = Hosts::on_devices(&[1, 2]);
    let found = hosts.all(|dev| {
        let rails = dev.world()?.explain(DType::F32, ReduceOp::Sum, of_pieces(2) * 2)?.rails.unwrap();
        Ok((rails.pieces, rails.overlap))
    });
    assert_eq!(found, [(2, false), (2, true), (2, true)]);
}

/// The last step of the first piece does not wait for the second one's rail.
#[test]
fn a_piece_is_there_while_the_next_one_is_on_its_way() {
    let hosts = Hosts::on_devices_with(&[2, 2], |builder| builder.check(Check::Off));
    let until = Arc::new(Mutex::new(()));
    let guard = until.lock();
    for mail in &hosts.mails {
        *mail.held.lock() = Some(Held { pass: 1, calls: HashMap::new(), until: until.clone() });
    }
    let (told, heard) = mpsc::channel();
    thread::scope(|scope| {
        let run = scope.spawn(|| {
            hosts.all(|dev| {
                let world = dev.world()?;
                let mut x = dev.upload(&numbers(world.rank(), of_pieces(2)))?;
                world.all_reduce(&mut x, ReduceOp::Sum)?;
                let side = dev.stream()?;
                let (start, wanted) = (Instant::now(), sums(4, of_pieces(1)));
                let there = || {
                    let beside = dev.on(&side);
                    // SAFETY: the checker is off, and what is read while it is written is only compared.
                    let unordered = unsafe { beside.unordered() };
                    unordered.download(&x.slice(..of_pieces(1)))
                };
                let mut right = false;
                while !right && start.elapsed() < Duration::from_secs(20) {
                    right = there()? == wanted;
                }
                told.send(right).unwrap();
                Ok(())
            })
        });
        let found: Vec<bool> = (0..4).map(|_| heard.recv().unwrap()).collect();
        drop(guard);
        run.join().unwrap();
        assert_eq!(found, [true; 4], "the first piece waits for the second one's rail");
    });
}

/// The first piece's rail does not wait for the second one's step inside, whose elements are not there yet.
#[test]
fn a_rail_begins_while_the_next_piece_is_staged() {
    let hosts = Hosts::on_devices(&[2, 2]);
    let until = Arc::new(Mutex::new(()));
    let guard = until.lock();
    for mail in &hosts.mails {
        *mail.held.lock() = Some(Held { pass: usize::MAX, calls: HashMap::new(), until: until.clone() });
    }
    thread::scope(|scope| {
        let run = scope.spawn(|| {
            hosts.all(|dev| {
                let world = dev.world()?;
                let source = dev.upload(&numbers(world.rank(), of_pieces(2)))?;
                dev.synchronize()?;
                let side = dev.stream()?;
                let (beside, until) = (dev.on(&side), until.clone());
                let mut op = beside.op("test")?;
                let rest = of_pieces(1) * 4..of_pieces(2) * 4;
                op.touch(source.block(), rest, Access::Write, false)?;
                op.submit(|driver, stream| driver.launch_host(stream, Box::new(move || drop(until.lock()))))?;
                let mut sum = dev.zeros::<f32>(of_pieces(2))?;
                world.all_reduce_into(&source, &mut sum, ReduceOp::Sum)?;
                dev.download(&sum)
            })
        });
        let begun = |count: usize| {
            let all = |held: &Held| (0..2).all(|device| held.calls.get(&device).is_some_and(|calls| *calls >= count));
            hosts.mails.iter().all(|mail| mail.held.lock().as_ref().is_some_and(all))
        };
        let start = Instant::now();
        // The second call begins when the first one is through, since the host waits in it.
        while !begun(2) && start.elapsed() < Duration::from_secs(20) {
            thread::sleep(Duration::from_millis(1));
        }
        let first_is_through = begun(2);
        drop(guard);
        let found = run.join().unwrap();
        assert!(first_is_through, "the first piece's rail waits for the second one's step inside");
        assert!(found.iter().all(|found| *found == sums(4, of_pieces(2))));
    });
}

/// A mutant: rails that do not wait for the step inside read what is not there.
#[test]
fn a_rail_waits_for_its_piece() {
    let sum = |rule: Option<Rule>| {
        let hosts = Hosts::on_devices_with(&[2, 2], |builder| builder.check(Check::Races));
        hosts.run(|dev| {
            let mut x = dev.upload(&numbers(0, of_pieces(2)))?;
            let world = dev.world()?;
            broken(rule, || world.all_reduce(&mut x, ReduceOp::Sum))
        })
    };
    assert!(sum(None).iter().all(Result::is_ok));
    let found = sum(Some(Rule::RailWaits));
    let race = |found: &gpu_pool::Result<Vec<()>>| match found {
        Err(Error::Misuse { report, .. }) => report.kind == Kind::Race,
        _ => false,
    };
    assert!(found.iter().any(race), "{found:?}");
}
