//! Hosts with memory in common: every method against plain sums, in pieces too, and when memory is given back.

use super::{SHAPES, combined, counts, numbers, part, sums};
use crate::loopback::Hosts;
use gpu_pool::{Error, ReduceOp, Result, gradients::GradientExchange};
use gpu_pool_cluster::extend::{CommonMemory, HostTransport, Message, Transport};
use parking_lot::Mutex;
use std::{
    sync::{Arc, OnceLock},
    thread,
    time::Duration,
};

/// Bytes of a slice that just do not fit into two pieces of it.
const MORE_THAN_TWO: usize = 2 * gpu_pool_cluster::extend::PIECE + 4;

type Done = Box<dyn Fn() -> bool + Send>;

/// Memory that the hosts have in common: a table of what is taken. Nothing is taken twice.
#[derive(Default)]
struct Common {
    taken: Mutex<Vec<Option<Box<[u64]>>>>,
    given: Mutex<Vec<(usize, Done)>>,
    /// A host that is stopped before it touches the memory of others, and whom it tells.
    stops: OnceLock<(usize, Box<dyn Fn() + Send + Sync>)>,
}

impl Common {
    fn in_use(&self) -> usize {
        for (at, done) in self.given.lock().drain(..) {
            if done() {
                assert!(self.taken.lock()[at].take().is_some(), "given back twice");
            }
        }
        self.taken.lock().iter().flatten().count()
    }
}

/// The number of an allocation is in the upper half.
const NUMBER: u32 = 32;

struct One(Arc<Common>, usize);

impl CommonMemory for One {
    fn take(&self, bytes: usize) -> Result<u64> {
        let mut taken = self.0.taken.lock();
        // Whatever was there: not zeros.
        taken.push(Some(vec![u64::MAX / 3; bytes.div_ceil(8) + 64].into()));
        Ok((taken.len() as u64 - 1) << NUMBER)
    }

    fn give(&self, at: u64, _: usize, done: Done) {
        self.0.given.lock().push(((at >> NUMBER) as usize, done));
    }

    fn address(&self, host: usize, at: u64, bytes: usize) -> Result<*mut u8> {
        if let Some((_, tell)) = self.0.stops.get().filter(|(stops, _)| *stops == self.1 && host != self.1) {
            tell();
            return Err(Error::custom("stopped"));
        }
        let mut taken = self.0.taken.lock();
        let memory = taken[(at >> NUMBER) as usize].as_mut().expect("it was given back");
        let (first, at) = (memory.as_mut_ptr().cast::<u8>(), (at & u64::from(u32::MAX)) as usize);
        let begin = first.align_offset(256);
        assert!(begin + at + bytes <= memory.len() * 8, "{at} + {bytes}");
        Ok(first.wrapping_add(begin + at))
    }

    fn wait(&self, done: &dyn Fn() -> bool, lost: &dyn Fn() -> Option<Error>) -> Result<()> {
        while !done() {
            lost().map_or(Ok(()), Err)?;
            thread::sleep(Duration::from_micros(50));
        }
        Ok(())
    }
}

/// A transport that carries no message.
struct Shared(Arc<Common>, usize);

impl HostTransport for Shared {
    fn name(&self) -> &'static str {
        "shared"
    }

    fn exchange(&self, messages: Vec<Message>, _: &dyn Fn() -> Option<Error>) -> Result<Vec<Message>> {
        assert!(messages.is_empty(), "a message");
        Ok(messages)
    }

    fn common_memory(self: Arc<Self>) -> Option<Arc<dyn CommonMemory>> {
        Some(Arc::new(One(self.0.clone(), self.1)))
    }
}

fn hosts(devices: &[usize]) -> (Hosts, Arc<Common>) {
    let common = Arc::new(Common::default());
    let transport = |_: &_, host| (Transport::Host(Arc::new(Shared(common.clone(), host))), None);
    (Hosts::over(devices, |builder| builder, transport), common)
}

#[test]
fn every_method_against_plain_sums() {
    for shape in SHAPES {
        let ((hosts, common), n) = (hosts(shape), shape.iter().sum::<usize>());
        let rails = *shape.iter().min().unwrap();
        // In pieces, too.
        let long = (shape == [2, 2]).then_some(rails * MORE_THAN_TWO / 4 + 3);
        for len in [0, 1, 2011].into_iter().chain(long) {
            let counts = &counts(n, len / n)[..];
            let total = counts.iter().sum();
            let found = hosts.all(|dev| {
                let world = dev.world()?;
                // Of one order and of another one, in which a process has parts that lie apart.
                let crossed: Vec<usize> = (0..n).step_by(2).chain((1..n).step_by(2)).collect();
                let mut right = Vec::new();
                for ranks in [(0..n).collect(), crossed] {
                    let group = world.group(&ranks)?;
                    let rank = group.rank();
                    let mut x = dev.upload(&numbers(rank, len))?;
                    group.all_reduce(&mut x, ReduceOp::Sum)?;
                    right.push(dev.download(&x)? == sums(n, len));
                    let mut x = dev.upload(&numbers(rank, len))?;
                    group.all_reduce(&mut x, ReduceOp::Max)?;
                    right.push(dev.download(&x)? == combined(n, len, f32::max));
                    let (source, mut own) = (dev.upload(&numbers(rank, total))?, dev.zeros(counts[rank])?);
                    group.reduce_scatter_v(&source, &mut own, counts, ReduceOp::Sum)?;
                    right.push(dev.download(&own)? == sums(n, total)[part(counts, rank)]);
                    let mut all = dev.zeros(total)?;
                    group.all_gather_v(&own, &mut all, counts)?;
                    right.push(dev.download(&all)? == sums(n, total));
                    let mut told = dev.upload(&numbers(rank, total))?;
                    group.broadcast(&mut told, n - 1)?;
                    right.push(dev.download(&told)? == numbers(n - 1, total));
                    let mut reduced = dev.upload(&numbers(rank, total))?;
                    group.reduce(&mut reduced, ReduceOp::Sum, 0)?;
                    right.push(rank > 0 || dev.download(&reduced)? == sums(n, total));
                }
                Ok(right)
            });
            assert_eq!(found, vec![vec![true; 12]; n], "{shape:?}, {len} elements");
        }
        drop(hosts);
        assert_eq!(common.in_use(), 0, "{shape:?}");
    }
}

/// Its members' proxies tell where their memory is.
#[test]
fn gradients_go_by_it() {
    let (hosts, common) = hosts(&[2, 3]);
    let found = hosts.all(|dev| {
        let world = dev.world()?;
        let mut exchange: GradientExchange =
            GradientExchange::builder().reduce(ReduceOp::Sum).build_in(&world, &[1000, 7])?;
        for layer in [1, 0] {
            let len = exchange.grad(layer)?.len();
            let own = numbers(world.rank(), len);
            dev.upload_into(&own, &mut exchange.grad_mut(layer)?)?;
            exchange.ready(dev, layer)?;
        }
        exchange.finish(dev)?;
        Ok(dev.download(&exchange.grad(0)?)? == sums(5, 1000) && dev.download(&exchange.grad(1)?)? == sums(5, 7))
    });
    assert_eq!(found, [true; 5]);
    drop(hosts);
    assert_eq!(common.in_use(), 0);
}

/// Memory that a lost process has not done with is never used again: the process may only have been stopped.
#[test]
fn memory_is_kept_for_a_process_that_is_lost() {
    let (hosts, common) = hosts(&[1, 1]);
    let hub = Arc::downgrade(&hosts.hub);
    let lose = move || hub.upgrade().expect("the test has it").lose(1);
    assert!(common.stops.set((1, Box::new(lose))).is_ok());
    let found = hosts.run(|dev| {
        let mut x = dev.upload(&[1.0f32])?;
        dev.world()?.all_reduce(&mut x, ReduceOp::Sum)
    });
    assert!(
        matches!(found[0], Err(Error::HostLost { host: 1, .. } | Error::AbortedByHost { host: 1, .. })),
        "{found:?}"
    );
    drop(hosts);
    // That of host 0; of host 1's, host 0 has done.
    assert_eq!(common.in_use(), 1);
}
