//! Checkpoints of a model in several processes: one of them writes, all have the same or none takes it over.

use crate::fleet::{Fleet, free_port, pool, say};
#[cfg(feature = "cuda")]
use crate::{fleet::GPU_VARIABLES, support::cuda_devices};
use gpu_pool::{Builder, Device, DeviceBuffer, Error, ReduceOp, error::WorldCall};
use gpu_pool_cluster::{Cluster, prelude::*};
use gpu_pool_train::{Checkpoint, DataParallel, Model, Optimizer, ShardedOptimizer, ShardedState};
use std::{fs, path::Path};

const LEN: usize = 3001;

struct One(DeviceBuffer<f32>);

impl Model for One {
    fn parameters(&mut self) -> Vec<&mut DeviceBuffer<f32>> {
        vec![&mut self.0]
    }
}

fn step(model: &mut DataParallel<One>) -> Result<(), Error> {
    let rows = 4;
    let pass = model.step(rows, |dev, shard, _, gradients| {
        let sum = shard.range(rows).len() as f32 * gradients.scale;
        gradients.write(0, |g| dev.fill(g, sum))
    });
    pass.map(drop)
}

fn weights(model: &mut DataParallel<One>) -> Result<Vec<Vec<f32>>, Error> {
    model.each(|dev, one| dev.download(&one.0))
}

/// The two calls of a difference.
fn calls(error: Error) -> [WorldCall; 2] {
    match error {
        Error::WorldMismatch { a, b, .. } => [*a, *b],
        error => panic!("{error}"),
    }
}

pub fn child(builder: Builder, folder: &str, sharded: &str) -> Result<(), Error> {
    let rank = Cluster::from_env()?.rank();
    let (folder, pool) = (Path::new(folder), pool(builder)?);
    let optimizer = Optimizer::adam(0.25);
    let optimizer = if sharded == "sharded" { optimizer.sharded() } else { optimizer };
    let build = |dev: &Device| Ok(One(dev.upload(&vec![1.0; LEN])?));
    let mut model = DataParallel::new_in(&pool, |dev| dev.world(), optimizer, build)?;
    let file = |name: &str| folder.join(name);

    // Rank 0 writes, and when `save` returns, the file is there for all.
    step(&mut model)?;
    model.save(file(&format!("first{rank}")))?;
    assert!(file("first0").exists() && !file("first1").exists());
    let first = weights(&mut model)?;
    assert!(first.iter().flatten().all(|x| (*x - 0.75).abs() < 1e-5), "a step of Adam by its rate");
    step(&mut model)?;
    model.save(file("second"))?;
    let second = weights(&mut model)?;
    let last = Checkpoint::load(file("second"))?;
    assert!(last.tensor::<f32>("parameters.0")? == second[0] && last.noted("gpu_pool.steps") == Some("2"));
    // A whole state, also where each process has a part.
    assert!(last.tensor::<f32>("first.0")?.iter().all(|x| *x == last.tensor::<f32>("first.0").unwrap()[0]));

    // What one process cannot write is an error on all.
    let error = model.save(file("nowhere").join("file")).unwrap_err();
    match (rank, &error) {
        (0, Error::Custom(why)) => assert!(why.to_string().contains("nowhere")),
        (1, Error::AbortedByHost { host: 0, cause, .. }) => assert!(cause.contains("nowhere")),
        _ => panic!("{error}"),
    }

    // Other steps: both processes hear both numbers, and nothing changes.
    let [a, b] = calls(model.load(file(["first0", "second"][rank])).unwrap_err());
    assert!((a.host, b.host) == (0, 1) && a.call.contains("step 1,") && b.call.contains("step 2,"), "{a} {b}");
    assert!(a.site.contains("checkpoint.rs") && b.site.contains("checkpoint.rs"), "{a} {b}");
    assert!(weights(&mut model)? == second && model.steps() == 2);

    // Other contents at the same step, in a place that only one process has a part of.
    let mut other = Checkpoint::load(file("second"))?;
    let mut moment = other.tensor::<f32>("second.0")?;
    moment[0] += if rank == 0 { 0.0 } else { 1.0 };
    other.insert("second.0", &[LEN], &moment)?;
    let [a, b] = calls(model.restore(&other).unwrap_err());
    assert!(a.call.contains("step 2,") && b.call.contains("step 2,") && a.call != b.call, "{a} {b}");

    // One has no file.
    let error = model.load(file(["first0", "missing"][rank])).unwrap_err();
    match rank {
        1 => assert!(matches!(&error, Error::Custom(why) if why.to_string().contains("missing")), "{error}"),
        _ => assert!(calls(error)[1].call.contains("missing")),
    }
    assert!(weights(&mut model)? == second && model.steps() == 2);

    // A refused checkpoint leaves the poison, the right one clears it.
    model.each(|_, _| Err::<(), _>(Error::custom("on purpose"))).unwrap_err();
    calls(model.load(file(["first0", "second"][rank])).unwrap_err());
    let error = weights(&mut model).unwrap_err();
    assert!(matches!(error, Error::Poisoned { .. }), "{error}");
    model.load(file("first0"))?;
    assert!(weights(&mut model)? == first && model.steps() == 1);
    step(&mut model)?;
    model.verify()?;
    assert!(weights(&mut model)? == second);
    let found = pool.run(|dev, _| states(dev, rank))?;
    for [a, b] in found {
        assert!(a.call.contains("step 3,") && b.call.contains("step 4,"), "{a} {b}");
    }
    say("right");
    pool.close()
}

/// The state of an optimizer without a model.
fn states(dev: &Device, rank: usize) -> Result<[WorldCall; 2], Error> {
    let mut own = ShardedOptimizer::<f32>::new(&dev.world()?, Optimizer::adam(0.1), ReduceOp::Sum, &[LEN])?;
    let same = ShardedState { steps: 3, ..own.state(dev)? };
    own.set_state(dev, &same)?;
    let error = own.set_state(dev, &ShardedState { steps: 3 + rank as u64, ..same.clone() }).unwrap_err();
    assert!(own.state(dev)? == same);
    Ok(calls(error))
}

fn checkpoints(devices: &str, name: &str, set: &[(&str, &str)]) {
    for kind in ["whole", "sharded"] {
        let folder = std::env::temp_dir().join(format!("gpu-pool-{}-{name}-{kind}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let task = format!("{devices} checkpoint {} {kind}", folder.display());
        let fleet = Fleet::of(&[task.clone(), task], free_port(), |rank, process| {
            process.envs(set.iter().copied()).env("NCCL_HOSTID", format!("checkpoint{rank}"));
        });
        assert_eq!(fleet.said(), [["right"], ["right"]]);
        fs::remove_dir_all(&folder).unwrap();
    }
}

#[test]
fn one_process_writes_and_all_have_the_same() {
    checkpoints("1", "checkpoint", &[]);
}

#[test]
#[cfg(feature = "cuda")]
fn cuda_one_process_writes_and_all_have_the_same() {
    if cuda_devices() == 0 {
        return println!("skipped: no CUDA device");
    }
    checkpoints("cuda1", "checkpoint-cuda", &GPU_VARIABLES);
}

/// After a NaN in one of them, groups of a cluster have other numbers of steps, and a checkpoint has all numbers.
#[test]
fn groups_go_on_from_their_own_steps() {
    let model = || {
        let cluster = Cluster::tcp(&format!("127.0.0.1:{}", free_port()), 0, 1, "").unwrap();
        let pool = gpu_pool::GpuPool::builder().host(2).cluster(cluster).build().unwrap();
        let build = |dev: &Device| Ok(One(dev.upload(&vec![1.0; LEN])?));
        let optimizer = Optimizer::adam(0.25);
        (DataParallel::new_in(&pool, |dev| dev.group(&[dev.rank()]), optimizer, build).unwrap(), pool)
    };
    let step = |model: &mut DataParallel<One>, nan: bool| {
        model.step(2, |dev, _, _, gradients| {
            let value = if nan && dev.index() == 1 { f32::NAN } else { 1.0 + dev.index() as f32 };
            gradients.write(0, |g| dev.fill(g, value))
        })
    };
    let (mut first, _pool) = model();
    step(&mut first, false).unwrap();
    step(&mut first, true).unwrap();
    let error = step(&mut first, false).unwrap_err();
    assert!(matches!(error, Error::NotFinite { .. }), "{error}");
    let saved = first.checkpoint().unwrap();
    let (mut second, _pool) = model();
    second.restore(&saved).unwrap();
    for _ in 0..3 {
        step(&mut first, false).unwrap();
        step(&mut second, false).unwrap();
        assert!(weights(&mut first).unwrap() == weights(&mut second).unwrap());
    }
}
