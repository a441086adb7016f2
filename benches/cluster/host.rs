//! A process of a cluster: carries out orders at the same time as the others.

use std::{
    io, process, ptr,
    time::{Duration, Instant},
};

use cudarc::driver::sys::{self, CUresult, CUstream};
use gpu_pool::{Device, DeviceBuffer, Error, GpuPool, Group, ReduceOp, Result};
use gpu_pool_cluster::{Cluster, prelude::*};
use gpu_pool_lab::{Check, prelude::*};
use gpu_pool_train::{Optimizer, ShardedOptimizer, prelude::*};
use half::bf16;

use crate::{
    backward::{self, Backward},
    mpi,
    nccl::{self, Rank},
    perceptron::Replica,
    support::gpus,
};

/// While the parent measures something else, a process waits for its next order.
const LONG: Duration = Duration::from_secs(3600);

/// Answers orders with microseconds per call.
pub fn serve(task: &str) {
    let mut words = task.split(' ');
    let what = words.next();
    let gpu = what == Some("gpu");
    let mut number = || words.next().and_then(|word| word.parse::<usize>().ok()).expect("a number");
    let (devices, most) = (number(), number());
    if what == Some("mpi") {
        return mpi::serve(most);
    }
    let cluster = Cluster::from_env().expect("a launcher's variables");
    let builder = GpuPool::builder().timeout(LONG).check(Check::Off).record_memory(false);
    let builder = match gpu {
        true => builder.cuda().devices(&[cluster.local_rank() % gpus::count()]),
        false => builder.host(devices).module(&backward::MODULE),
    };
    let pool = builder.cluster(cluster).build().expect("the processes come together");
    let served = pool.run(|dev, _| {
        let world = dev.world()?;
        let mut member = Member {
            nccl: None,
            data: dev.zeros(most / 4)?,
            replica: None,
            backward: None,
            divided: None,
            world: &world,
        };
        if gpu {
            member.nccl = Some([member.join_nccl(true)?, member.join_nccl(false)?]);
        }
        let sides: &[&str] = if gpu { &["world", "blocking", "polled"] } else { &["world"] };
        sides.iter().try_for_each(|side| member.check(side))?;
        member.serve()
    });
    if let Err(Error::HostLost { host, .. }) = served {
        println!("{host}");
        process::exit(1);
    }
    served.expect("the devices work");
    pool.close().expect("the processes part");
}

/// A part of a divided optimizer, with gradients and parameters.
struct Divided {
    order: String,
    own: ShardedOptimizer<bf16>,
    grads: DeviceBuffer<bf16>,
    weights: [DeviceBuffer<bf16>; 1],
}

impl Divided {
    fn new(world: &Group<'_>, order: &str, (lent, clip): (bool, &str), params: usize) -> Result<Divided> {
        let (dev, optimizer) = (world.device(), Optimizer::adam_w(1e-4));
        let optimizer = if clip == "clip" { optimizer.clip(1.0) } else { optimizer };
        let own = ShardedOptimizer::new(world, optimizer, ReduceOp::Avg, &[params])?;
        let own = if lent { own } else { own.by_calls() };
        let (mut grads, mut weights) = (dev.zeros::<bf16>(own.len())?, [dev.zeros::<bf16>(params)?]);
        // Noise: equal numbers take less power.
        dev.normal(&mut grads.slice_mut(own.place(0)), 0.0, 1e-3, 1 + world.rank() as u64, 0)?;
        dev.normal(&mut weights[0], 0.0, 0.02, 0, 0)?;
        Ok(Divided { order: order.to_owned(), own, grads, weights })
    }

    fn step(&mut self, dev: &Device) -> Result<()> {
        self.own.step(dev, &mut self.grads, &mut self.weights).map(drop)
    }
}

/// A device of the world.
struct Member<'a> {
    /// One that blocks and one that is polled, on GPUs.
    nccl: Option<[Rank; 2]>,
    data: DeviceBuffer<f32>,
    /// With its batch.
    replica: Option<(usize, Replica)>,
    /// With its bytes.
    backward: Option<(usize, Backward)>,
    divided: Option<Divided>,
    world: &'a Group<'a>,
}

impl Member<'_> {
    /// The first member reads orders `<what> <rounds>` and passes them on, until there are no more.
    fn serve(&mut self) -> Result<()> {
        let mut lines = (self.world.rank() == 0).then(|| io::stdin().lines());
        loop {
            let line = lines.as_mut().and_then(Iterator::next).transpose();
            let line = line.map_err(|error| Error::custom(error.to_string()))?.unwrap_or_default();
            let order = self.world.exchange_serde(&line)?.swap_remove(0);
            let Some((what, rounds)) = order.split_once(' ') else { return Ok(()) };
            let micros = self.time(what, rounds.parse().expect("a number"))?;
            let slowest = self.world.exchange_serde(&micros)?.into_iter().fold(0.0, f64::max);
            if self.world.rank() == 0 {
                println!("{slowest}");
            }
        }
    }

    /// Microseconds per call here.
    fn time(&mut self, order: &str, rounds: usize) -> Result<f64> {
        let parts: Vec<&str> = order.split('/').collect();
        let number = |text: &str| text.parse::<usize>().expect("a number");
        let clock = match parts[..] {
            ["forever", bytes] => {
                let len = number(bytes) / 4;
                self.all_reduce("world", len)?;
                if self.world.rank() == 0 {
                    println!("0");
                }
                loop {
                    self.all_reduce("world", len)?;
                }
            }
            ["barrier"] => {
                let clock = self.begin("world")?;
                (0..rounds).try_for_each(|_| self.world.barrier())?;
                clock
            }
            [what @ ("all_reduce" | "single"), side, bytes] => {
                let len = number(bytes) / 4;
                self.all_reduce(side, len)?;
                let clock = self.begin(side)?;
                for _ in 0..rounds {
                    self.all_reduce(side, len)?;
                    if what == "single" {
                        self.wait(side)?;
                    }
                }
                self.wait(side)?;
                clock
            }
            [what @ ("step" | "alone"), batch] => {
                let (batch, dev) = (number(batch), self.world.device());
                if self.replica.as_ref().is_none_or(|(of, _)| *of != batch) {
                    self.replica = None;
                    self.replica = Some((batch, Replica::new(self.world, batch)?));
                }
                let clock = self.begin("world")?;
                let (_, replica) = self.replica.as_mut().expect("there is one now");
                replica.set_sync(what == "step")?;
                (0..rounds).try_for_each(|_| replica.step(dev))?;
                self.wait("world")?;
                clock
            }
            [way @ ("lent" | "three_calls"), clip, params] => {
                if self.divided.as_ref().is_none_or(|divided| divided.order != order) {
                    self.divided = None;
                    self.divided = Some(Divided::new(self.world, order, (way == "lent", clip), number(params))?);
                }
                let divided = self.divided.as_mut().expect("there is one now");
                divided.step(self.world.device())?;
                let clock = self.begin("world")?;
                let divided = self.divided.as_mut().expect("as above");
                (0..rounds).try_for_each(|_| divided.step(self.world.device()))?;
                self.wait("world")?;
                clock
            }
            ["backward", when, bytes] => {
                let (bytes, dev) = (number(bytes), self.world.device());
                if self.backward.as_ref().is_none_or(|(of, _)| *of != bytes) {
                    self.backward = Some((bytes, Backward::new(self.world, bytes)?));
                }
                let clock = self.begin("world")?;
                let (_, backward) = self.backward.as_mut().expect("there is one now");
                (0..rounds).try_for_each(|_| backward.step(dev, when == "beside"))?;
                clock
            }
            _ => panic!("{order}: no order"),
        };
        Ok(clock.elapsed().as_secs_f64() * 1e6 / rounds as f64)
    }

    /// Idle devices, and all members at once.
    fn begin(&self, side: &str) -> Result<Instant> {
        self.wait(side)?;
        self.world.barrier()?;
        Ok(Instant::now())
    }

    fn all_reduce(&mut self, side: &str, len: usize) -> Result<()> {
        let Some(rank) = self.nccl(side) else {
            return self.world.all_reduce(&mut self.data.slice_mut(..len), ReduceOp::Sum);
        };
        let at = ptr::with_exposed_provenance_mut(self.data.slice(..len).address() as usize);
        // SAFETY: `data` has these bytes, of this stream's device; it lives until the end, when all is waited for.
        unsafe { rank.all_reduce(at, len, self.stream()?) };
        Ok(())
    }

    /// As programs wait that have what this side has.
    fn wait(&self, side: &str) -> Result<()> {
        if self.nccl(side).is_none() {
            return self.world.device().synchronize();
        }
        // SAFETY: the stream lives as long as the pool.
        let code = unsafe { sys::cuStreamSynchronize(self.stream()?) };
        assert_eq!(code, CUresult::CUDA_SUCCESS, "the stream fails");
        Ok(())
    }

    fn nccl(&self, side: &str) -> Option<&Rank> {
        let at = ["blocking", "polled"].iter().position(|name| *name == side)?;
        self.nccl.as_ref().map(|ranks| &ranks[at])
    }

    fn stream(&self) -> Result<CUstream> {
        Ok(self.world.device().cuda()?.stream().cu_stream())
    }

    fn join_nccl(&self, blocking: bool) -> Result<Rank> {
        let own = if self.world.rank() == 0 { nccl::unique_id() } else { Vec::new() };
        let id = self.world.exchange_serde(&own)?.swap_remove(0);
        Ok(Rank::join(id, (self.world.rank(), self.world.count()), blocking))
    }

    /// All sides sum what all members have.
    fn check(&mut self, side: &str) -> Result<()> {
        let (dev, len) = (self.world.device(), self.data.len().min(1 << 20));
        dev.fill(&mut self.data.slice_mut(..len), 1.0)?;
        self.all_reduce(side, len)?;
        self.wait(side)?;
        let found = dev.download(&self.data.slice(..len))?;
        assert!(found.iter().all(|&x| x == self.world.count() as f32), "{side} does not sum");
        dev.fill(&mut self.data, 0.0)
    }
}
