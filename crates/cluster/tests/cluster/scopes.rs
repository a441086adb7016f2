//! Scopes of several processes: sums, names, and failures before the first call that needs others.

use crate::fleet::{Fleet, pool, say};
use gpu_pool::{Builder, Error, ReduceOp};
use gpu_pool_cluster::Cluster;
use std::time::Duration;

pub fn sum(builder: Builder) -> Result<(), Error> {
    let pool = pool(builder)?;
    let found = pool.run(|dev, _| {
        let world = dev.world()?;
        let mut x = dev.upload(&(0..1001).map(|i| (i * (world.rank() + 1)) as f32).collect::<Vec<_>>())?;
        world.all_reduce(&mut x, ReduceOp::Sum)?;
        world.barrier()?;
        Ok((world.rank(), dev.download(&x)?))
    })?;
    for (rank, x) in found {
        say(format!("{rank}: {} {}", x[1], x[1000]));
    }
    pool.close()
}

#[test]
fn all_devices_of_all_processes_add_up() {
    for devices in [&[2, 2][..], &[1, 3], &[2, 1, 2]] {
        let ranks: usize = devices.iter().sum();
        let whole = (ranks * (ranks + 1) / 2) as f32;
        let said = Fleet::start("sum", devices).said().concat();
        let expected: Vec<_> = (0..ranks).map(|rank| format!("{rank}: {whole} {}", 1000.0 * whole)).collect();
        assert_eq!(said, expected);
    }
}

/// Process 0 begins a scope that the others do not begin, then one that they wait in.
pub fn names(builder: Builder) -> Result<(), Error> {
    let alone = Cluster::from_env()?.rank() == 0;
    let pool = pool(if alone { builder.timeout(Duration::from_secs(1)) } else { builder })?;
    if alone {
        say(pool.named("alone").run(|_, _| Ok(())).unwrap_err());
    }
    // What has failed leaves the cluster usable.
    say(format!("{:?}", pool.named("together").run(|dev, _| Ok(dev.world()?.rank()))?));
    pool.close()
}

/// Process 1 fails its third step before it has asked for the world, and a scope of its own; both go on.
pub fn early(builder: Builder) -> Result<(), Error> {
    let rank = Cluster::from_env()?.rank();
    let pool = pool(builder)?;
    for step in 0..5 {
        let found = pool.run(|dev, _| {
            if (rank, step) == (1, 2) {
                return Err(Error::custom("early"));
            }
            let mut x = dev.upload(&[step as f32])?;
            dev.world()?.all_reduce(&mut x, ReduceOp::Sum)?;
            Ok(dev.download(&x)?[0])
        });
        match found {
            Ok(sums) => say(format!("{step}: {}", sums[0])),
            Err(error) => say(format!("{step}: {error}")),
        }
        if (rank, step) == (1, 3) {
            pool.run(|_, _| Err::<(), _>(Error::custom("alone"))).unwrap_err();
        }
    }
    pool.close()
}

/// Once the next step of process 1 met the third step of process 0.
#[test]
fn a_scope_that_fails_before_its_first_world_leaves_the_next_ones_in_order() {
    let said = Fleet::start("early", &[1, 2]).said();
    for (rank, lines) in said.iter().enumerate() {
        assert_eq!(lines.len(), 5);
        for (step, line) in lines.iter().enumerate() {
            match step {
                2 => assert!(line.contains("early") && line.contains("host 1") == (rank == 0), "{line}"),
                _ => assert_eq!(*line, format!("{step}: {}", 3 * step)),
            }
        }
    }
}

/// Once the caller waited for ever for devices that had not been told of the scope.
#[test]
fn a_named_scope_that_others_do_not_begin_times_out() {
    let said = Fleet::start("names", &[2, 1]).said().concat();
    assert!(said[0].contains(r#""alone"; missing hosts: [1]"#), "{said:?}");
    assert_eq!(said[1..], ["[0, 1]", "[2]"]);
}
