//! Pads on software GPUs, which have no kernels that wait: their memory, and what all processes compute alike.

use super::*;
use crate::{
    driver::host,
    fabric::layout::{FLAGS, HEADER},
};
use std::os::fd::AsFd;

/// The pads of `count` processes, each of which has mapped all.
fn pads(count: usize) -> Vec<LonePad> {
    let drivers = host::machine(&vec![host::HostConfig::default(); count]);
    let made = drivers.iter().enumerate().map(|(me, driver)| LonePad::new(driver, me, count).unwrap());
    let (mut pads, memory): (Vec<_>, Vec<_>) = made.unzip();
    for (me, pad) in pads.iter_mut().enumerate() {
        for other in (0..count).filter(|other| *other != me) {
            pad.import(other, memory[other].as_fd()).unwrap();
        }
    }
    pads.iter_mut().for_each(|pad| pad.lay_out(4).unwrap());
    pads
}

/// What a process sees of the pad of another one.
fn words(of: &LonePad, process: usize) -> Vec<u64> {
    let (layout, count) = (of.layout, of.memory.pads.len());
    let bytes = layout.bytes(count);
    let host = of.memory.driver.host_alloc(bytes).unwrap();
    let at = of.memory.pads[process];
    // SAFETY: the pad has so many bytes, and so has the host's memory.
    of.with_stream(Duration::from_secs(60), |stream| unsafe { of.memory.driver.copy_to_host(host, at, bytes, stream) })
        .unwrap();
    // SAFETY: as above; the copy is over.
    let words = unsafe { std::slice::from_raw_parts(host.cast::<u64>(), bytes / 8) }.to_vec();
    // SAFETY: it came from `host_alloc`.
    unsafe { of.memory.driver.host_free(host).unwrap() };
    words
}

#[test]
fn a_pad_has_room_for_one_trip_and_for_packets() {
    for count in [2, 3, 4, 8, MOST] {
        let (layout, direct) = (PadLayout::one_trip(count), PadLayout::direct(count));
        assert_eq!((layout.inbox, layout.packets), (direct.inbox, direct.packets));
        assert_eq!(layout.inbox(count).start, HEADER + FLAGS + (count - 1) * 2 * direct.packets * 16);
        assert_eq!(layout.bytes(count), layout.inbox(count).start + (count - 1) * 2 * direct.inbox);
        assert!(layout.bytes(count) < (7 << 20) + (512 << 10), "{count}: {}", layout.bytes(count));
    }
}

/// Others read them before they trust a mapping.
#[test]
fn behind_a_pad_are_words_of_its_process() {
    let pads = pads(3);
    for pad in &pads {
        for process in 0..3 {
            let host = pad.memory.driver.host_alloc(PROBED * 4).unwrap();
            let (limit, at) = (Duration::from_secs(60), pad.behind(process));
            // SAFETY: both have so many bytes.
            pad.with_stream(limit, |s| unsafe { pad.memory.driver.copy_to_host(host, at, PROBED * 4, s) }).unwrap();
            // SAFETY: as above; the copy is over.
            let words = unsafe { std::slice::from_raw_parts(host.cast::<u32>(), PROBED) };
            let wanted = |i| builtin::pattern(i as u64, process as u32);
            assert!(words.iter().enumerate().all(|(i, word)| *word == wanted(i)));
            // SAFETY: it came from `host_alloc`.
            unsafe { pad.memory.driver.host_free(host).unwrap() };
        }
    }
}

#[test]
fn a_pad_names_all_pads_where_this_process_has_them() {
    let pads = pads(3);
    for (me, pad) in pads.iter().enumerate() {
        let words = words(pad, me);
        for (process, window) in pad.memory.pads.iter().enumerate() {
            assert_eq!(words[process], *window);
        }
        assert!(words[3..MOST].iter().all(|word| *word == 0));
        let abort = pad.memory.words.addr() as u64;
        assert_eq!((words[MOST], words[MOST + 1]), (abort, abort + REPORT as u64));
        // No rooms of eager sends, no slots; the rooms of one trip begin behind the packets.
        let inbox = pad.layout.inbox(pads.len()).start;
        let wholes = (pad.layout.inbox as u64) << 32 | (inbox - HEADER - FLAGS) as u64;
        assert_eq!(words[MOST + 4 + MOST / 2], wholes);
        let inbox = inbox / 8;
        assert!(words[HEADER / 8..inbox].iter().all(|word| *word == 0));
        assert!(words[inbox..].iter().all(|word| *word == u64::MAX));
    }
}

#[test]
fn what_one_process_writes_is_in_the_pad_of_the_other() {
    let pads = pads(2);
    let inbox = pads[0].layout.inbox(2).start;
    let at = pads[0].memory.pads[1] + inbox as u64;
    let limit = Duration::from_secs(60);
    // SAFETY: a place in the inbox.
    pads[0].with_stream(limit, |stream| unsafe { pads[0].memory.driver.fill_u8(at, 7, 8, stream) }).unwrap();
    assert_eq!(words(&pads[1], 1)[inbox / 8], 0x0707_0707_0707_0707);
    assert_eq!(words(&pads[1], 0)[inbox / 8], u64::MAX);
}

/// Members choose alike: by what all know.
#[test]
fn a_sum_goes_by_the_pads_up_to_the_room_and_up_to_the_limit_of_one_trip() {
    let [two, three, eight] = [2, 3, 8].map(|count| pads(count).swap_remove(0));
    assert_eq!(two.most(2), 2 << 20);
    assert_eq!(three.most(3), 864_000);
    // A group of two in a cluster of more has their smaller rooms.
    assert_eq!(eight.most(2), PadLayout::direct(8).inbox);
    assert_eq!(eight.most(8), 109_714);
    let types = [DType::F32, DType::F64, DType::F16, DType::BF16, DType::I32, DType::U8];
    assert_eq!(types.map(LonePad::sums), [true, true, true, true, false, false]);
}

/// A pad has no slots, and names no buffers: what is not one trip is three calls.
#[test]
fn rows_are_normed_by_the_pads_up_to_the_room() {
    let row = Rows { dtype: DType::BF16, rows: 0, cols: 4096, threads: 128, eps: 0.0, layer: false };
    let one_kernel = |pad: &LonePad, members, rows| pad.norm(Rows { rows, ..row }, members).is_some();
    let [two, three, eight] = [2, 3, 8].map(|count| pads(count).swap_remove(0));
    assert!(one_kernel(&two, 2, 1) && one_kernel(&two, 2, 256) && !one_kernel(&two, 2, 257));
    // 1 MB of each, also where a sum alone takes less.
    assert!(three.most(3) < 1 << 20 && one_kernel(&three, 3, 128) && !one_kernel(&three, 3, 129));
    assert!(one_kernel(&eight, 8, 13) && !one_kernel(&eight, 8, 14));
    assert!(two.norm(Rows { rows: 1, cols: 4095, ..row }, 2).is_none());
}

#[test]
fn an_abort_is_for_every_gang_and_a_report_for_one() {
    let pad = &pads(2)[0];
    // SAFETY: words of the pad, which no kernel uses.
    let (abort, report) = unsafe { (&*pad.memory.word(0), &mut *pad.memory.word(REPORT)) };
    assert_eq!((*abort, pad.given_up()), (0, None));
    pad.abort();
    assert_eq!(*abort, u64::MAX);
    *report = 5 << 8 | 0x80 | 1;
    assert_eq!(pad.given_up(), Some((5, 1, Duration::ZERO)));
}
