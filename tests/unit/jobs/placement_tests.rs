//! The rules of placement, by themselves and in virtual time.

use super::*;
use proptest::prelude::*;
use std::collections::VecDeque;

const GB: u64 = 1 << 30;

fn job(bytes: u64) -> Need {
    Need { bytes, ..Need::default() }
}

/// Numbers of bytes beyond all memory.
#[test]
fn memory_without_a_bound_does_not_overflow() {
    let mut table = Table::new([u64::MAX, GB], 1);
    table.set_resident(0, GB);
    table.add(job(u64::MAX), 0);
    table.add(job(u64::MAX), 1);
    let first = table.next().unwrap();
    table.thread_is_free(0);
    assert!(table.next().is_none());
    assert_eq!(table.nearest(job(1).wants()).as_slice(), [1], "it has memory that is free");
    table.over(0, first.need.bytes);
    assert_eq!(table.next().unwrap().job, 1);
}

/// Lets a job's closure end, and its work.
fn finish<J>(table: &mut Table<J>, start: &Start<J>) {
    for &device in &start.devices {
        table.thread_is_free(device);
        table.over(device, start.need.bytes);
    }
}

/// Devices in virtual time. A closure takes no time; the work of a device's jobs is done one after the other.
struct Simulation {
    table: Table<f64>,
    speeds: Vec<f64>,
    /// By device: the ends of its jobs, with their bytes.
    ends: Vec<VecDeque<(f64, u64)>>,
    now: f64,
}

impl Simulation {
    fn new(speeds: &[f64], capacity: u64, overlap: usize) -> Self {
        let table = Table::new(speeds.iter().map(|_| capacity), overlap);
        Simulation { table, speeds: speeds.to_vec(), ends: vec![VecDeque::new(); speeds.len()], now: 0.0 }
    }

    /// The time at which all jobs are over.
    fn run(mut self, jobs: &[(f64, u64)]) -> f64 {
        for &(work, bytes) in jobs {
            self.table.add(job(bytes), work);
        }
        let mut begun = 0;
        loop {
            while let Some(start) = self.table.next() {
                let device = start.devices[0];
                let from = self.ends[device].back().map_or(self.now, |(end, _)| *end);
                self.ends[device].push_back((from + start.job / self.speeds[device], start.need.bytes));
                self.table.thread_is_free(device);
                begun += 1;
            }
            let first = |device: &usize| self.ends[*device].front().map(|(end, _)| *end);
            let next = (0..self.ends.len()).filter(|d| first(d).is_some());
            let Some(device) = next.min_by(|a, b| first(a).partial_cmp(&first(b)).unwrap()) else { break };
            let (end, bytes) = self.ends[device].pop_front().unwrap();
            self.now = end;
            self.table.over(device, bytes);
        }
        assert_eq!((begun, self.table.len()), (jobs.len(), 0), "a job was forgotten");
        self.now
    }
}

/// List scheduling, the largest first, with memory without end.
fn ideal(speeds: &[f64], jobs: &[(f64, u64)]) -> f64 {
    let mut work: Vec<f64> = jobs.iter().map(|(work, _)| *work).collect();
    work.sort_by(|a, b| b.partial_cmp(a).unwrap());
    let mut ends = vec![0.0f64; speeds.len()];
    for work in work {
        let end = |device: &usize| ends[*device] + work / speeds[*device];
        let best = (0..speeds.len()).min_by(|a, b| end(a).partial_cmp(&end(b)).unwrap()).unwrap();
        ends[best] += work / speeds[best];
    }
    ends.into_iter().fold(0.0, f64::max)
}

/// The bound: at least 97 % of ideal list scheduling.
#[test]
fn uneven_jobs_are_near_list_scheduling() {
    // 1:1 to 1:20, with memory in proportion: it fits two and a half of the largest.
    let jobs: Vec<(f64, u64)> = (0..64u64).map(|i| 1 + i * 37 % 20).map(|size| (size as f64, size * GB)).collect();
    let speeds = [1.0; 4];
    for overlap in 0..=3 {
        let found = Simulation::new(&speeds, 50 * GB, overlap).run(&jobs);
        let share = ideal(&speeds, &jobs) / found;
        assert!(share >= 0.97, "overlap {overlap}: {share}");
    }
}

#[test]
fn devices_of_different_speed_are_near_the_ideal() {
    let speeds = [1.0, 1.0, 3.0];
    let even = vec![(1.0, 0); 300];
    let uneven: Vec<(f64, u64)> = (0..300u64).map(|i| 1 + i * 37 % 20).map(|size| (size as f64, size)).collect();
    for jobs in [even, uneven] {
        let all: f64 = jobs.iter().map(|(work, _)| work).sum();
        for overlap in 0..=1 {
            let share = all / 5.0 / Simulation::new(&speeds, GB, overlap).run(&jobs);
            assert!(share >= 0.97, "overlap {overlap}: {share}");
        }
    }
}

/// Endless small jobs beside one that needs all memory, or has the lowest priority: it is overtaken `AGE` times. Then
/// others begin only on other devices, each when one that was in flight is over.
#[test]
fn no_job_waits_for_ever() {
    let last = Need { priority: -1, ..Need::default() };
    let pair = Need { gpus: 2, priority: -1, ..Need::default() };
    for (devices, need) in [(1, job(GB)), (3, job(GB)), (1, last.clone()), (3, last), (2, pair.clone()), (3, pair)] {
        let mut table = Table::new((0..devices).map(|_| GB), 3);
        let mut flying = VecDeque::new();
        let mut overtaken = 0;
        // Each device has work when it comes.
        for _ in 0..16 {
            table.add(job(GB / 8), false);
        }
        for _ in 0..devices {
            let start = table.next().unwrap();
            table.thread_is_free(start.devices[0]);
            flying.push_back((start.devices[0], start.need.bytes));
        }
        let before = table.len() as u64;
        let elsewhere = if devices > need.gpus { 4 * devices as u64 } else { 0 };
        table.add(need.clone(), true);
        loop {
            while table.len() < 16 {
                table.add(job(GB / 8), false);
            }
            if let Some(start) = table.next() {
                if start.job {
                    break;
                }
                overtaken += 1;
                assert!(overtaken <= before + AGE + elsewhere, "{need:?} on {devices} devices");
                start.devices.iter().for_each(|&device| table.thread_is_free(device));
                flying.push_back((start.devices[0], start.need.bytes));
            } else {
                let (device, bytes) = flying.pop_front().expect("something flies if nothing begins");
                table.over(device, bytes);
            }
        }
        assert!(overtaken > 0, "it did not have to wait");
    }
}

#[test]
fn the_largest_goes_first_and_small_ones_fill_the_gaps() {
    let mut table = Table::new([10], 3);
    for bytes in [3, 8, 6, 2, 1] {
        table.add(job(bytes), bytes);
    }
    let mut order = Vec::new();
    let mut starts = Vec::new();
    while let Some(start) = table.next() {
        table.thread_is_free(0);
        order.push(start.job);
        starts.push(start);
    }
    assert_eq!(order, [8, 2]);
    assert_eq!((table.why(), table.memory(0)), (Some(Waits::Memory), (10, 10)));
    table.over(0, 8);
    let next: Vec<u64> = std::iter::from_fn(|| {
        let start = table.next()?;
        table.thread_is_free(0);
        Some(start.job)
    })
    .collect();
    assert_eq!(next, [6, 1]);
}

#[test]
fn higher_priorities_go_first() {
    let mut table = Table::new([GB], 0);
    for priority in [0, 2, 1] {
        table.add(Need { priority, ..job(1) }, priority);
    }
    let mut order = Vec::new();
    while let Some(start) = table.next() {
        finish(&mut table, &start);
        order.push(start.job);
    }
    assert_eq!(order, [2, 1, 0]);
}

#[test]
fn preferences_decide_ties() {
    let mut table = Table::new([GB, GB], 0);
    let prefers = |device| Need { prefer: Some(device), ..Need::default() };
    table.add(prefers(1), 'a');
    let first = table.next().unwrap();
    assert_eq!(first.devices[..], [1]);
    // The other device is idle.
    table.add(prefers(1), 'b');
    let second = table.next().unwrap();
    assert_eq!(second.devices[..], [0]);
    // Of equal jobs, each device takes those that prefer it.
    for (device, name) in [(1, 'c'), (0, 'd')] {
        table.add(prefers(device), name);
    }
    finish(&mut table, &second);
    assert_eq!(table.next().map(|start| (start.devices[0], start.job)), Some((0, 'd')));
    finish(&mut table, &first);
    assert_eq!(table.next().map(|start| (start.devices[0], start.job)), Some((1, 'c')));
}

#[test]
fn the_last_jobs_go_to_the_device_that_is_free_first() {
    let mut table = Table::new([GB, GB], 1);
    for _ in 0..4 {
        table.add(job(0), ());
    }
    let devices: Vec<usize> = std::iter::from_fn(|| {
        let start = table.next()?;
        table.thread_is_free(start.devices[0]);
        Some(start.devices[0])
    })
    .collect();
    // The third one is beside the first; the fourth one waits for an idle device.
    assert_eq!((devices, table.why()), (vec![0, 1, 0], Some(Waits::Device)));
    table.over(1, 0);
    assert_eq!(table.next().unwrap().devices[..], [1]);
    // A single device has no choice.
    let mut table = Table::new([GB], 1);
    for _ in 0..2 {
        table.add(job(0), ());
        table.next().unwrap();
        table.thread_is_free(0);
    }
}

#[test]
fn a_gang_at_the_head_holds_devices() {
    let mut table = Table::new([GB; 3], 1);
    table.add(job(0), 0);
    let single = table.next().unwrap();
    table.add(Need { gpus: 3, ..Need::default() }, 1);
    table.add(job(0), 2);
    table.thread_is_free(0);
    assert!(table.next().is_none(), "the small job would delay the gang");
    assert_eq!(table.why(), Some(Waits::Gang));
    table.over(single.devices[0], 0);
    let gang = table.next().unwrap();
    assert_eq!((&gang.devices[..], gang.job), (&[0, 1, 2][..], 1));
    assert!(table.next().is_none());
    finish(&mut table, &gang);
    assert_eq!(table.next().unwrap().job, 2);
}

#[test]
fn refusals_have_numbers_and_lost_devices_take_no_job() {
    let mut table = Table::new([GB, 2 * GB], 0);
    assert!(table.refusal(&job(2 * GB)).is_none());
    assert!(table.refusal(&job(2 * GB + 1)).unwrap().contains("2147483648"));
    assert!(table.refusal(&Need { gpus: 2, ..job(2 * GB) }).unwrap().contains("on 2 of 2"));
    assert!(table.refusal(&Need { among: Some([5].into()), ..Need::default() }).is_some());
    table.add(job(2 * GB), "large");
    table.add(Need { prefer: Some(1), ..Need::default() }, "moves");
    assert_eq!(table.lose(1), ["large"]);
    assert_eq!(table.next().map(|start| (start.devices[0], start.job)), Some((0, "moves")));
    assert!(!table.has_lost_all() && table.lose(0).is_empty() && table.has_lost_all());
    assert!(table.refusal(&job(0)).is_some());
}

/// SP1 #2801: a job never begins on a device whose limit is below what it needs, not even on an idle one.
#[test]
fn a_job_above_a_device_s_limit_waits_for_a_larger_device() {
    let mut table = Table::new([GB, 4 * GB, 4 * GB], 0);
    table.add(job(3 * GB), 1);
    table.add(job(3 * GB), 2);
    table.add(job(3 * GB), 3);
    let first = table.next().unwrap();
    assert_eq!((first.devices[0], first.job), (1, 1));
    assert_eq!(table.next().unwrap().devices[0], 2);
    assert!(table.next().is_none());
    finish(&mut table, &first);
    assert_eq!(table.next().unwrap().devices[0], 1);
    // A gang, too.
    let mut table = Table::new([GB, 4 * GB, 4 * GB], 0);
    table.add(Need { gpus: 2, ..job(3 * GB) }, 0);
    assert_eq!(table.next().unwrap().devices[..], [1, 2]);
    table.add(Need { gpus: 2, ..job(3 * GB) }, 1);
    assert!(table.next().is_none());
    assert_eq!(table.nearest(Need { gpus: 2, ..job(3 * GB) }.wants())[..], [1, 2]);
}

/// Jobs that go back into the queue keep their places, and the list of the oldest forgets those that have left.
#[test]
fn the_oldest_job_is_known() {
    let mut table = Table::new([GB], 0);
    let low = table.add(Need { priority: -1, ..job(0) }, 0);
    let ranks: Vec<Rank> = (1..=500).map(|i| table.add(job(0), i)).collect();
    for &rank in &ranks[..450] {
        table.remove(rank).unwrap();
    }
    assert!(table.oldest.len() < 200, "{}", table.oldest.len());
    assert!(!table.holds(ranks[7]) && table.holds(low));
    table.put_back(ranks[7], job(0), 8);
    assert!(table.oldest.iter().is_sorted_by_key(|rank| rank.seq) && table.holds(ranks[7]));
    // It was overtaken 450 times.
    assert_eq!(table.due(), Some(low));
    assert_eq!(table.next().unwrap().job, 0);
    assert_eq!(table.due(), Some(ranks[7]));
}

#[test]
fn what_outlives_jobs_is_not_given_out_twice() {
    let mut table = Table::new([10], 3);
    table.set_resident(0, 4);
    for bytes in [4, 3, 2] {
        table.add(job(bytes), bytes);
    }
    let mut begun = Vec::new();
    while let Some(start) = table.next() {
        table.thread_is_free(0);
        begun.push(start.job);
    }
    assert_eq!(begun, [4, 2]);
    // A device without jobs takes any job below its limit: otherwise it would wait for ever.
    let mut table = Table::new([10], 0);
    table.set_resident(0, 9);
    table.add(job(10), ());
    assert!(table.next().is_some());
}

proptest! {
    /// Whatever comes and goes: no device has more jobs or memory than it may, and every job runs once.
    #[test]
    fn every_job_begins_once_within_the_limits(
        overlap in 0usize..4,
        jobs in prop::collection::vec((0u64..=10, 1usize..=3, -1i32..=1, prop::option::of(0usize..3)), 1..60),
        choices in prop::collection::vec(any::<u8>(), 200),
    ) {
        let mut table = Table::new([10; 3], overlap);
        let mut flying: Vec<(Devices, u64)> = Vec::new();
        let mut begun = vec![false; jobs.len()];
        for (i, &(bytes, gpus, priority, prefer)) in jobs.iter().enumerate() {
            table.add(Need { bytes, gpus, priority, prefer, among: None }, i);
        }
        let mut choices = choices.into_iter().cycle();
        loop {
            while let Some(start) = table.next() {
                prop_assert!(!std::mem::replace(&mut begun[start.job], true));
                prop_assert_eq!(start.devices.len(), jobs[start.job].1);
                start.devices.iter().for_each(|&device| table.thread_is_free(device));
                flying.push((start.devices, start.need.bytes));
                for device in 0..3 {
                    let here = flying.iter().filter(|(devices, _)| devices.contains(&device));
                    let booked: u64 = here.clone().map(|(_, bytes)| bytes).sum();
                    prop_assert!(here.count() <= overlap + 1 && booked <= 10);
                }
            }
            if flying.is_empty() {
                break;
            }
            let (devices, bytes) = flying.swap_remove(usize::from(choices.next().unwrap()) % flying.len());
            devices.iter().for_each(|&device| table.over(device, bytes));
        }
        prop_assert!(begun.iter().all(|begun| *begun));
    }
}
