use super::*;

fn rows(dtype: DType, rows: usize, cols: usize) -> Rows {
    let threads = (cols * dtype.size()).div_ceil(64).next_power_of_two().clamp(32, 1024) as u32;
    Rows { dtype, rows, cols, threads, eps: 1e-5, layer: false }
}

fn plan_as(wish: Wish, members: usize, of: Rows) -> Option<NormKernel> {
    NormKernel::of(of, members, PadLayout::direct(members), &Limits::new(132), wish)
}

fn plan(members: usize, of: Rows) -> Option<NormKernel> {
    plan_as(Wish::Auto, members, of)
}

#[test]
fn what_fits() {
    for members in [2, 3, 8, 16] {
        for (dtype, most) in [(DType::F32, 16384), (DType::F16, 16384), (DType::BF16, 16384)] {
            for cols in [8, 1000, 1024, 4096, 8192, most] {
                for count in [1, 3, 64, 1000, 4096, 1 << 20] {
                    let found = plan(members, rows(dtype, count, cols));
                    let Some(found) = found.or_else(|| plan_as(Wish::Inbox, members, rows(dtype, count, cols))) else {
                        panic!("it fits");
                    };
                    assert_eq!(found.wide, found.rows.threads > 512 && found.split == 1);
                    let (width, height, _) = found.dims().block;
                    assert!((32..=if found.wide { 1024 } else { 512 }).contains(&(width * height)));
                    // Each block of a row has whole warps of those of the kernels of norms, and the row one step.
                    let several = found.split > 1;
                    assert!(found.split.is_power_of_two() && found.rows.threads / found.split >= 32);
                    assert!(!several || (found.way == Way::OneTrip && found.together == 1 && found.spread > 1));
                    assert!(!several || found.blocks as usize == count * found.split as usize);
                    assert!(
                        [1, 2, 4].contains(&found.spread)
                            && (found.spread == 1 || found.way == Way::OneTrip || members > 2)
                    );
                    assert!(found.blocks >= 1 && found.blocks <= 128 && found.together.is_power_of_two());
                }
            }
        }
        let refused = [(DType::F64, 1, 64), (DType::F32, 1, 3), (DType::BF16, 1, 20_000), (DType::F32, 0, 64)];
        assert!(refused.iter().all(|&(dtype, count, cols)| plan(members, rows(dtype, count, cols)).is_none()));
    }
    let through_host = PadLayout::through_host(2);
    assert_eq!(NormKernel::of(rows(DType::F32, 1, 64), 2, through_host, &Limits::new(132), Wish::Auto), None);
    // What was asked for.
    let way = |wish| plan_as(wish, 3, rows(DType::F16, 4096, 4096)).map(|found| found.way);
    assert_eq!([Wish::Direct, Wish::Auto, Wish::Inbox].map(way), [Way::Pull, Way::Pull, Way::ByOwners].map(Some));
    assert_eq!(plan_as(Wish::Direct, 2, rows(DType::F32, 1, 64)).unwrap().about().name, "norm_pull");
    assert!([Wish::Copies, Wish::Ring, Wish::Staged].iter().all(|&wish| way(wish).is_none()));
}

#[test]
fn by_size() {
    let way = |members, count| plan(members, rows(DType::BF16, count, 4096)).unwrap().way;
    // 256 rows are 2 MB.
    assert_eq!([256, 257].map(|count| way(2, count)), [Way::OneTrip, Way::Pull]);
    assert_eq!([way(8, 13), way(8, 2048)], [Way::OneTrip, Way::Pull]);
    let three_calls = |members, count| plan(members, rows(DType::BF16, count, 4096)).is_none();
    assert!([14, 2047].iter().all(|&count| three_calls(8, count)) && !three_calls(4, 64));
    // An inbox of four members takes 672 KB of each.
    assert_eq!([way(4, 84), way(4, 85)], [Way::OneTrip, Way::Pull]);
    let dims = |count| plan(2, rows(DType::BF16, count, 4096)).unwrap().dims();
    assert_eq!((dims(1).grid.0, dims(1).block), (1, (512, 1, 1)));
    let long = |count| plan(2, rows(DType::F32, count, 16384)).unwrap();
    let blocks = |count| (long(count).split, long(count).blocks, long(count).dims().block.0);
    assert_eq!([1, 8, 9, 31, 32].map(blocks), [(8, 8, 512), (8, 64, 512), (4, 36, 512), (4, 124, 512), (4, 128, 512)]);
    let eight = Limits::new(8);
    let few = NormKernel::of(rows(DType::F32, 3, 16384), 2, PadLayout::direct(2), &eight, Wish::Auto).unwrap();
    assert_eq!((few.split, few.blocks, few.wide), (1, 3, true));
    assert_eq!((dims(200).grid.0, dims(200).block), (100, (256, 2, 1)));
    assert_eq!((dims(4096).grid.0, dims(4096).block), (128, (128, 4, 1)));
}
