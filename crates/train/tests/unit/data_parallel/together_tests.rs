use super::*;
use gpu_pool::extend::train::{Bucket, Unit, part_of};
use proptest::prelude::*;

proptest! {
    /// Every element of the parts is found in the table, as the kernel looks for it, and nothing else is there.
    #[test]
    fn each_element_has_its_addresses(
        sizes in prop::collection::vec(prop_oneof![0..9usize, 0..9000usize], 1..12), bytes in 1..60_000usize,
        members in 1..5usize, half in any::<bool>(),
    ) {
        let (unit, size) = if half { (Unit::of::<u16>(), 2) } else { (Unit::of::<f32>(), 4) };
        let order: Vec<usize> = (0..sizes.len()).rev().collect();
        let layout = Layout::new(unit, &sizes, &order, (bytes, bytes)).unwrap();
        let of = |member: usize| move |x: usize| ((member + 1) << 40 | x << 32) as u64;
        // Parameters, and behind them buckets.
        let told = |m: usize| (0..sizes.len()).map(of(m)).chain((0..layout.buckets.len()).map(of(20 + m))).collect();
        let told: Vec<Arc<[u64]>> = (0..members).map(told).collect();
        let mut seen = 0;
        for rank in 0..members {
            let own = |(b, bucket): (usize, &Bucket)| {
                let state = [0, of(10)(b), of(11)(b)];
                Own { part: part_of(bucket.len, rank, members), state }
            };
            let own: Vec<Own> = layout.buckets.iter().enumerate().map(own).collect();
            let parts: Vec<_> = own.iter().map(|own| own.part.clone()).collect();
            let table = table(&layout, &own, &told, size);
            let found: Vec<&[u64]> = table.chunks(words(members)).collect();
            prop_assert_eq!(found.len(), pieces(&layout, &parts));
            seen += found.iter().map(|piece| piece[1] as usize).sum::<usize>();
            let (mut mine, mut all) = (0, 0);
            for (b, bucket) in layout.buckets.iter().enumerate() {
                let part = &parts[b];
                for &parameter in &bucket.gradients {
                    let range = layout.extents[parameter].range();
                    for e in range.start.max(part.start)..range.end.min(part.end) {
                        let i = mine * CHUNK + e - part.start;
                        let at = found.partition_point(|piece| piece[0] as usize <= i) - 1;
                        let (piece, j) = (found[at], (i - found[at][0] as usize) as u64);
                        prop_assert!(j < piece[1]);
                        prop_assert_eq!(piece[2] as usize + i / CHUNK, all + e / CHUNK);
                        let moment = |member: usize| of(member)(b) + 4 * (e - part.start) as u64;
                        prop_assert_eq!(piece[3], 0);
                        prop_assert_eq!([piece[4] + 4 * j, piece[5] + 4 * j], [moment(10), moment(11)]);
                        for member in 0..members {
                            let by_rank = |k: usize| piece[6 + k * members + member] + j * size as u64;
                            let places = [of(20 + member)(b) + (e * size) as u64,
                                of(member)(parameter) + ((e - range.start) * size) as u64];
                            prop_assert_eq!([0, 1].map(by_rank), places);
                        }
                    }
                }
                mine += part.len().div_ceil(CHUNK);
                all += bucket.len.div_ceil(CHUNK);
            }
        }
        prop_assert_eq!(seen, sizes.iter().sum::<usize>());
    }
}
