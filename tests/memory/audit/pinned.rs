//! Page-locked memory: it is the host that writes too far, and the host that looks.

use super::rig::{audited, found};
use crate::{on_both, support};

on_both! {
    // The host writes past the end of page-locked memory.
    1: fn page_locked_memory_too(gpus) {
        let pool = audited(gpus, 1);
        let poke = |len: usize, at: usize| {
            let mut x = pool.pinned::<u8>(len).unwrap();
            let start = x.as_mut_slice().unwrap().as_mut_ptr().expose_provenance();
            // SAFETY: within the pool's memory, of which these bytes are nobody's.
            unsafe { std::ptr::with_exposed_provenance_mut::<u8>(start + at).write_volatile(1) };
        };
        for len in [100, 300_000] {
            poke(len, len + 5);
            let report = found(pool.run(|_, _| Ok(())));
            assert_eq!((report.bytes.clone(), report.allocation.as_ref().unwrap().device), (len + 5..len + 6, None));
            let (op, site) = report.allocation.as_ref().unwrap().by.unwrap();
            assert!(op == "pinned" && site.file() == file!(), "{report}");
        }
        poke(4000, 4000);
        assert_eq!(found(pool.close()).bytes, 4000..4001);
    }

    // Dropped while copies run: nobody looks, and nothing is poisoned, before they are over (pytorch#127612).
    1: fn page_locked_memory_in_flight_is_left_alone(gpus) {
        let pool = audited(gpus, 1);
        for round in 0..20u8 {
            let seen = pool.run(|dev, _| {
                let mut busy = dev.zeros::<u32>(1)?;
                support::slow_add(dev, &mut busy, 1, 2000)?;
                let mut host = dev.pinned::<u8>(50_000)?;
                host.as_mut_slice()?.fill(round);
                let x = dev.upload_pinned(&host)?;
                drop(host);
                let again = dev.pinned::<u8>(50_000)?;
                drop(again);
                dev.download(&x)
            });
            assert!(seen.unwrap()[0].iter().all(|byte| *byte == round), "round {round}");
        }
        pool.close().unwrap();
    }
}
