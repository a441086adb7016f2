//! `send` and `recv` over a transport between devices: whichever devices, and what happens when the transport fails.

use super::numbers;
use crate::loopback::Hosts;
use gpu_pool::extend::cluster::{
    Call, Label,
    collective::{AcrossProcesses, Outgoing, area},
};
use gpu_pool::{AsView, Device, DeviceBuffer, Element, Error, ReduceOp, Result};
use gpu_pool_cluster::extend::Hierarchical;
use gpu_pool_lab::{Check, prelude::*};
use proptest::prelude::*;
use std::{sync::mpsc, thread, time::Duration};

/// Each member sends to each other one, and to all of them before it receives.
fn between_all(hosts: &Hosts, n: usize, lens: &[usize]) {
    let found = hosts.all(|dev| {
        let world = dev.world()?;
        let me = world.rank();
        let others = || (1..n).map(|k| (me + k) % n);
        for &len in lens {
            for to in others() {
                world.send(&dev.upload(&numbers(me * n + to, len))?, to)?;
            }
        }
        let mut right = true;
        for &len in lens {
            // The last sender first.
            for from in others().collect::<Vec<_>>().into_iter().rev() {
                let mut x = dev.zeros::<f32>(len)?;
                world.recv(&mut x, from)?;
                right &= dev.download(&x)? == numbers(from * n + me, len);
            }
        }
        for to in others() {
            world.send_owned(dev.upload(&vec![me as u8; to * 3])?, to)?;
        }
        for from in others() {
            let any: DeviceBuffer<u8> = world.recv_any(from)?;
            right &= dev.download(&any)? == vec![from as u8; me * 3];
        }
        Ok(right)
    });
    assert!(found.iter().all(|right| *right), "{found:?}");
}

/// Also where only one of the two processes has the other's ordinal.
#[test]
fn messages_go_between_any_devices() {
    for shape in [&[1, 1][..], &[2, 2], &[1, 3], &[3, 1, 2]] {
        between_all(&Hosts::on_devices(shape), shape.iter().sum(), &[0, 1, 1000]);
    }
    between_all(&Hosts::on_devices(&[2, 1]), 3, &[200_003]);
}

#[test]
fn the_race_checker_is_content_with_messages() {
    between_all(&Hosts::on_devices_with(&[2, 1], |builder| builder.check(Check::Races)), 3, &[0, 500]);
}

/// A sender writes to its buffer at once, and collectives go between the messages.
#[test]
fn messages_are_copies_and_keep_out_of_collectives_way() {
    let found = Hosts::on_devices(&[2, 2]).all(|dev| {
        let world = dev.world()?;
        let me = world.rank();
        let mut x = dev.upload(&numbers(me, 999))?;
        for round in 0..5 {
            world.send(&x, 3 - me)?;
            dev.fill(&mut x, round as f32)?;
            let mut sum = dev.upload(&[me as f32])?;
            world.all_reduce(&mut sum, ReduceOp::Sum)?;
            assert_eq!(dev.download(&sum)?, [6.0]);
            let mut y = dev.zeros::<f32>(999)?;
            world.recv(&mut y, 3 - me)?;
            let wanted = if round == 0 { numbers(3 - me, 999) } else { vec![(round - 1) as f32; 999] };
            assert!(dev.download(&y)? == wanted, "{round}");
        }
        Ok(())
    });
    assert_eq!(found.len(), 4);
}

/// Several parts and a header, as those of `give`: short, too long for a meeting's note, and empty parts.
#[test]
fn shipments_have_headers_and_parts() {
    let found = Hosts::on_devices(&[2, 1]).all(|dev| {
        let world = dev.world()?;
        let call = Call::new("give");
        for (header, lens) in [(0, vec![]), (5, vec![3, 0, 70_000]), (20_000, vec![0]), (9000, vec![1, 2, 3, 4])] {
            if world.rank() < 2 {
                let parts: Vec<_> = lens.iter().map(|&len| dev.upload(&vec![len as u8; len])).collect::<Result<_>>()?;
                let outgoing = Outgoing {
                    header: (0..header).map(|i| i as u8).collect(),
                    parts: parts.iter().map(|part| area(part.view())).collect(),
                };
                Hierarchical.send(&world, (&call, Label::Value(7)), &outgoing, 2)?;
                continue;
            }
            for from in [1, 0] {
                let incoming = Hierarchical.receive(&world, (&call, Label::Value(7)), from)?;
                assert!(incoming.header().iter().enumerate().all(|(i, byte)| *byte == i as u8));
                assert_eq!((incoming.header().len(), incoming.lens()), (header, &lens[..]));
                let parts: Vec<_> = lens.iter().map(|&len| dev.zeros::<u8>(len)).collect::<Result<_>>()?;
                incoming.store(&parts.iter().map(|part| area(part.view())).collect::<Vec<_>>())?;
                for (part, len) in parts.iter().zip(&lens) {
                    assert_eq!(dev.download(part)?, vec![*len as u8; *len]);
                }
            }
        }
        Ok(())
    });
    assert_eq!(found.len(), 3);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]
    /// Any messages, as long as each receiver takes those of one sender in their order.
    #[test]
    fn any_messages(
        shape in prop::collection::vec(1usize..4, 2..4),
        messages in prop::collection::vec((0usize..9, 0usize..9, 0usize..2000), 0..30),
    ) {
        let n: usize = shape.iter().sum();
        let messages: Vec<_> = messages.into_iter().map(|(from, to, len)| (from % n, to % n, len)).collect();
        let found = Hosts::on_devices(&shape).all(|dev| {
            let world = dev.world()?;
            let me = world.rank();
            for (number, &(_, to, len)) in messages.iter().enumerate().filter(|(_, message)| message.0 == me) {
                world.send(&dev.upload(&numbers(number, len))?, to)?;
            }
            let mut right = true;
            for (number, &(from, _, len)) in messages.iter().enumerate().filter(|(_, message)| message.1 == me) {
                let mut x = dev.zeros::<f32>(len)?;
                world.recv(&mut x, from)?;
                right &= dev.download(&x)? == numbers(number, len);
            }
            Ok(right)
        });
        prop_assert!(found.iter().all(|right| *right));
    }
}

#[test]
fn a_message_of_another_length_fails_both() {
    let found = Hosts::on_devices(&[1, 2]).run(|dev| {
        let world = dev.world()?;
        match world.rank() {
            0 => world.send(&dev.zeros::<f32>(3)?, 2),
            2 => world.recv(&mut dev.zeros::<f32>(4)?, 0),
            _ => Ok(()),
        }
    });
    assert!(matches!(&found[1], Err(Error::WorldMismatch { what: "count", .. })), "{:?}", found[1]);
    assert!(found[0].is_err());
}

/// The first call on a rail of each of these processes never ends, until the transport of process 0 fails. As NCCL's
/// abort does, that lets the streams go on, with memory that nobody has written.
fn stuck<R: Send>(shape: &[usize], work: impl Fn(&Device) -> Result<R> + Sync) -> (Hosts, Vec<Result<Vec<R>>>) {
    let hosts = Hosts::on_devices(shape);
    let (submitted, submissions) = mpsc::channel();
    let ends: Vec<_> = hosts.mails.iter().map(|mail| mail.get_stuck(submitted.clone())).collect();
    let failure = Error::Transport { library: "test", op: "a call", code: 6, why: "the network broke".to_owned() };
    let mails = &hosts.mails;
    let found = thread::scope(|threads| {
        threads.spawn(move || {
            let called = shape.iter().all(|_| submissions.recv_timeout(Duration::from_secs(30)).is_ok());
            if !called {
                println!("there was no call on a rail");
            }
            mails[0].failure.set(&failure);
            drop(ends);
        });
        hosts.run(work)
    });
    (hosts, found)
}

fn is_the_cause(error: &Error) -> bool {
    matches!(error, Error::Transport { library: "test", code: 6, .. })
}

/// A wait for the stream of a call that has failed is an error, not wrong numbers.
#[test]
fn a_failed_transport_ends_waits() {
    let (hosts, found) = stuck(&[1, 1], |dev| {
        let mut x = dev.upload(&numbers(0, 1000))?;
        dev.world()?.all_reduce(&mut x, ReduceOp::Sum)?;
        let found = dev.download(&x);
        assert!(found.is_err(), "wrong numbers");
        found
    });
    assert!(matches!(&found[0], Err(error) if is_the_cause(error)), "{:?}", found[0]);
    match &found[1] {
        Err(Error::AbortedByHost { host: 0, cause, .. }) => assert!(cause.contains("the network broke"), "{cause}"),
        other => panic!("{other:?}"),
    }
    // It stays so, and local work goes on.
    let again = hosts.pools[0].run(|dev, _| dev.world()?.barrier());
    assert!(matches!(&again, Err(error) if is_the_cause(error)), "{again:?}");
    let local = hosts.pools[0].run(|dev, _| dev.download(&dev.upload(&[1.0f32])?));
    assert_eq!(local.unwrap(), [[1.0]]);
}

/// So is a wait for the hub; and the scope's end does not wait for a message that will never go.
#[test]
fn a_failed_transport_ends_messages_on_their_way() {
    for sender in [0, 1] {
        let (_, found) = stuck(&[1, 1], |dev| {
            let world = dev.world()?;
            let mut x = dev.upload(&numbers(0, 10))?;
            match world.rank() == sender {
                true => world.send(&x, 1 - sender)?,
                false => world.recv(&mut x, sender)?,
            }
            if sender == 0 { world.barrier() } else { Ok(()) }
        });
        assert!(matches!(&found[0], Err(error) if is_the_cause(error)), "{sender} {:?}", found[0]);
        assert!(found[1].is_err(), "{sender}");
    }
}

/// The type is agreed on before anything goes.
#[test]
fn a_message_of_another_type_fails_both() {
    fn send<T: Element>(dev: &Device, x: T) -> Result<()> {
        dev.world()?.send(&dev.upload(&[x])?, 1)
    }
    let found = Hosts::on_devices(&[1, 1]).run(|dev| match dev.world()?.rank() {
        0 => send(dev, 1u32),
        _ => dev.world()?.recv(&mut dev.zeros::<f32>(1)?, 0),
    });
    assert!(found.iter().all(|found| matches!(found, Err(Error::WorldMismatch { .. }))), "{found:?}");
}
