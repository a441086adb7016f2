//! `give` and `take` between processes: which values cross, in any order of tags, and what ends a wait.

use crate::loopback::Hosts;
use gpu_pool::{
    Builder, Device, DeviceBuffer, Element, Error, Result,
    collective::{Pack, Transfer, Unpack},
};
use gpu_pool_lab::{Check, prelude::*};
use proptest::prelude::*;
use std::{fmt::Debug, sync::Arc};

fn set(builder: Builder) -> Builder {
    builder.check(Check::Races).register_transfer::<Batch>().register_transfer::<Local>().register_transfer::<Wrong>()
}

/// Two processes with two devices and with one.
fn hosts() -> Hosts {
    Hosts::with(&[2, 1], set)
}

/// The same over each kind of transport.
fn over_each() -> [Hosts; 2] {
    [hosts(), Hosts::on_devices_with(&[2, 1], set)]
}

#[derive(Debug, PartialEq)]
struct Text(String);

struct Batch {
    x: DeviceBuffer<f32>,
    names: Vec<String>,
    more: Option<(DeviceBuffer<u8>, usize, isize)>,
}
gpu_pool::transfer_fields!(Batch { x, names, more });

/// It does not say how it crosses.
struct Local;
impl Transfer for Local {
    fn transfer(self, _: &Device) -> Result<Self> {
        Ok(self)
    }
}

/// It reads less than it writes.
struct Wrong;
impl Transfer for Wrong {
    fn transfer(self, _: &Device) -> Result<Self> {
        Ok(self)
    }
    fn pack(self, into: &mut Pack) -> Result<()> {
        into.bytes(&[1, 2, 3]);
        7u32.pack(into)
    }
    fn unpack(from: &mut Unpack<'_>) -> Result<Self> {
        assert_eq!(from.bytes()?, [1, 2, 3]);
        Ok(Wrong)
    }
}

fn crosses<T: Element + PartialEq + Debug>(hosts: &Hosts, of: impl Fn(u32) -> T + Sync) {
    let some = |n: u32| (0..n).map(&of).collect::<Vec<T>>();
    hosts.all(|dev| {
        let world = dev.world()?;
        if world.rank() == 0 {
            world.give(dev.upload(&some(1000))?, 2, 1)?;
            world.give(vec![dev.upload(&some(0))?, dev.upload(&some(7))?], 2, 2)?;
            world.give((dev.upload(&some(3))?, dev.upload(&[5i64])?), 2, 3)?;
            world.give(vec![(dev.upload(&some(4))?, dev.upload(&[2.0f32; 9])?)], 2, 4)?;
            world.give(Arc::new(dev.upload(&some(5))?), 2, 5)?;
        }
        if world.rank() == 2 {
            let five = world.take::<Arc<DeviceBuffer<T>>>(0, 5)?;
            let [(four, twos)] = &world.take::<Vec<(DeviceBuffer<T>, DeviceBuffer<f32>)>>(0, 4)?[..] else { panic!() };
            let (three, number) = world.take::<(DeviceBuffer<T>, DeviceBuffer<i64>)>(0, 3)?;
            let [none, seven] = &world.take::<Vec<DeviceBuffer<T>>>(0, 2)?[..] else { panic!() };
            let mut one = world.take::<DeviceBuffer<T>>(0, 1)?;
            assert_eq!((dev.download(&one)?, dev.download(none)?), (some(1000), some(0)));
            assert_eq!((dev.download(seven)?, dev.download(&three)?), (some(7), some(3)));
            assert_eq!((dev.download(four)?, dev.download(&*five)?), (some(4), some(5)));
            assert_eq!((dev.download(&number)?, dev.download(twos)?), (vec![5], vec![2.0; 9]));
            // It is this device's own.
            dev.fill(&mut one, of(1))?;
        }
        Ok(())
    });
}

#[test]
fn buffers_pairs_and_vecs_cross() {
    for hosts in over_each() {
        crosses(&hosts, |x| x as f32);
        crosses(&hosts, f64::from);
        crosses(&hosts, |x| half::f16::from_f32(x as f32));
        crosses(&hosts, |x| half::bf16::from_f32(x as f32));
        crosses(&hosts, |x| x as i8);
        crosses(&hosts, |x| x as u8);
        crosses(&hosts, |x| x as i32);
        crosses(&hosts, |x| x);
        crosses(&hosts, i64::from);
        crosses(&hosts, u64::from);
    }
}

/// A header of 100 kB, and the memory of another device of the giver's process.
#[test]
fn types_of_the_program_cross() {
    let each = |dev: &Device| {
        let world = dev.world()?;
        let names = |n: usize| (0..n).map(|name| format!("name {name}")).collect::<Vec<_>>();
        match world.rank() {
            0 => world.give(dev.upload(&[1.5f32; 300])?, 1, 0)?,
            1 => {
                let x = world.take::<DeviceBuffer<f32>>(0, 0)?;
                assert_eq!(x.device(), 0);
                world.give(Batch { x, names: names(10_000), more: None }, 2, 0)?;
                let more = Some((dev.upload(&[9u8, 8])?, usize::MAX, -1));
                world.give(Batch { x: dev.upload(&[])?, names: names(0), more }, 2, 0)?;
            }
            _ => {
                let first = world.take::<Batch>(1, 0)?;
                assert_eq!(
                    (dev.download(&first.x)?, first.names, first.more.is_none()),
                    (vec![1.5; 300], names(10_000), true)
                );
                let (bytes, most, least) = world.take::<Batch>(1, 0)?.more.unwrap();
                assert_eq!((dev.download(&bytes)?, most, least), (vec![9, 8], usize::MAX, -1));
            }
        }
        // Inside a process any value goes, as ever.
        match world.rank() {
            0 => world.give(Text("any".into()), 1, 3)?,
            1 => assert_eq!(world.take::<Text>(0, 3)?, Text("any".into())),
            _ => {}
        }
        Ok(())
    };
    over_each().iter().for_each(|hosts| _ = hosts.all(each));
}

#[test]
fn what_cannot_hop_is_refused_in_place() {
    let found = hosts().all(|dev| {
        let world = dev.world()?;
        let refused = |result: Result<()>, words: &[&str]| match result {
            Err(Error::InvalidArgument { why, site, .. }) => {
                words.iter().all(|word| why.contains(word)) && site.file().ends_with("hand_over.rs")
            }
            _ => false,
        };
        let to = if world.rank() < 2 { 2 } else { 0 };
        Ok([
            refused(world.give(Text(String::new()), to, 0), &["Text", "Builder::register_transfer"]),
            refused(world.take::<Text>(to, 0).map(drop), &["Text", "Builder::register_transfer"]),
            refused(world.give(Local, to, 0), &["Local", "pack"]),
            refused(world.give(1u8, 3, 0), &["member 3 of 3"]),
        ])
    });
    assert_eq!(found, [[true; 4]; 3]);
}

/// What a device does after it has given does not change what was given, and the taker waits for it.
#[test]
fn values_are_those_of_the_moment_of_the_give() {
    let each = |dev: &Device| {
        let world = dev.world()?;
        if world.rank() == 0 {
            let x = Arc::new(dev.upload(&vec![1.0f32; 100_000])?);
            for round in 0..5 {
                let mut y = dev.zeros(x.len())?;
                dev.axpy(round as f32, &*x, &mut y)?;
                world.give(y, 2, 0)?;
                // The memory of `y` again.
                let mut z = dev.zeros::<f32>(x.len())?;
                dev.fill(&mut z, -1.0)?;
            }
        }
        for round in 0..if world.rank() == 2 { 5 } else { 0 } {
            let mut y = world.take::<DeviceBuffer<f32>>(0, 0)?;
            dev.scale(&mut y, 2.0)?;
            assert!(dev.download(&y)?.iter().all(|&y| y == 2.0 * round as f32));
        }
        Ok(())
    };
    over_each().iter().for_each(|hosts| _ = hosts.all(each));
}

#[test]
fn a_value_of_another_type_is_a_mismatch() {
    let found = hosts().run(|dev| {
        let world = dev.world()?;
        match world.rank() {
            0 => world.give(1u32, 2, 5),
            2 => world.take::<f32>(0, 5).map(drop),
            _ => Ok(()),
        }
    });
    for found in found {
        let Err(Error::WorldMismatch { a, b, .. }) = found else { panic!("{found:?}") };
        let calls = format!("{} {}", a.call, b.call);
        assert!(calls.contains("tag 5 of u32") && calls.contains("tag 5 of f32"), "{calls}");
        assert!(a.site.contains("hand_over.rs") && b.site.contains("hand_over.rs"));
    }
    // It writes more than it reads: the taker finds out, and all hear of it.
    let found = hosts().run(|dev| match dev.world()?.rank() {
        0 => dev.world()?.give(Wrong, 2, 5),
        2 => dev.world()?.take::<Wrong>(0, 5).map(drop),
        _ => Ok(()),
    });
    assert!(matches!(&found[1], Err(Error::InvalidArgument { why, .. }) if why.contains("otherwise")), "{found:?}");
    assert!(matches!(&found[0], Err(Error::AbortedByHost { host: 1, .. })), "{found:?}");
}

#[test]
fn a_wait_ends_with_the_giver() {
    let hosts = hosts();
    let found = hosts.run(|dev| if dev.world()?.rank() < 2 { Ok(0) } else { dev.world()?.take::<u8>(0, 0) });
    assert!(matches!(&found[1], Err(Error::WorldMismatch { what: "participation", .. })), "{found:?}");
    let found = hosts.run(|dev| match dev.world()?.rank() {
        1 => Err(Error::custom("on purpose")),
        0 => Ok(0),
        _ => dev.world()?.take::<u8>(0, 0),
    });
    assert!(matches!(&found[1], Err(Error::AbortedByHost { host: 0, .. })), "{found:?}");
    // A value that nobody takes is an error, too: its giver cannot know that it may be forgotten.
    let found = hosts.run(|dev| if dev.world()?.rank() == 0 { dev.world()?.give(1u8, 2, 0) } else { Ok(()) });
    assert!(found.iter().any(|found| matches!(found, Err(Error::WorldMismatch { .. }))), "{found:?}");
    hosts.all(|dev| dev.world()?.barrier());
}

/// What is given: from, to, tag, elements.
type Gift = (usize, usize, u64, usize);

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    /// Each member gives all it has to give, then takes what is for it: tag by tag, in an order of its own.
    #[test]
    fn any_gifts_in_any_order_of_tags(
        shape in prop::collection::vec(1usize..4, 2..4),
        gifts in prop::collection::vec((any::<usize>(), any::<usize>(), 0u64..4, 0usize..300), 0..40),
        turn in 0u64..4,
        on_devices: bool,
    ) {
        let n: usize = shape.iter().sum();
        let gifts: Vec<Gift> = gifts.into_iter().map(|(from, to, tag, len)| (from % n, to % n, tag, len)).collect();
        let hosts = if on_devices { Hosts::on_devices(&shape) } else { Hosts::new(&shape) };
        let found = hosts.all(|dev| {
            let world = dev.world()?;
            let me = world.rank();
            for (number, &(_, to, tag, len)) in gifts.iter().enumerate().filter(|(_, gift)| gift.0 == me) {
                world.give((dev.upload(&vec![number as u32; len])?, dev.upload(&[me as u8])?), to, tag)?;
            }
            let mut mine: Vec<_> = gifts.iter().enumerate().filter(|(_, gift)| gift.1 == me).collect();
            mine.sort_by_key(|(_, gift)| (gift.2 + turn + me as u64) % 4);
            let mut right = true;
            for (number, &(from, _, tag, len)) in mine {
                let (x, giver) = world.take::<(DeviceBuffer<u32>, DeviceBuffer<u8>)>(from, tag)?.transfer(dev)?;
                right &= dev.download(&x)? == vec![number as u32; len] && dev.download(&giver)? == [from as u8];
            }
            Ok(right)
        });
        prop_assert!(found.into_iter().all(|right| right));
    }
}
