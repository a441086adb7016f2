//! `examples/prove`: its field, transforms and trees against other crates', on software GPUs and on CUDA devices; and
//! the program. `cargo test` builds it; `cargo test --test prove` does not.

#[path = "../examples/prove/prover/mod.rs"]
mod prover;
#[path = "../examples/prove/reference.rs"]
mod reference;
mod support;

use gpu_pool::{Device, Error};
use proptest::prelude::*;
use prover::{MODULE, Prover, field, merkle, ntt};
use winter_math::{FieldElement, StarkField, fields::f64::BaseElement};

/// Every integer, and often one at an edge of the field: some of them are not canonical.
fn element() -> impl Strategy<Value = u64> {
    let edges = [0, 1, 0xffff_ffff, 1 << 32, field::P - 1, field::P, field::P + 1, u64::MAX];
    prop_oneof![prop::sample::select(edges.to_vec()), any::<u64>()]
}

/// Coefficients of one of the lengths.
fn polynomial(log_n: impl Strategy<Value = u32>) -> impl Strategy<Value = Vec<u64>> {
    log_n.prop_flat_map(|log_n| prop::collection::vec(element(), 1 << log_n))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if support::long() { 100_000 } else { 2000 }))]

    #[test]
    fn arithmetic_is_that_of_winter_math(a in element(), b in element()) {
        let (ours, theirs) = ([a, b].map(field::canonical), [a, b].map(BaseElement::new));
        prop_assert_eq!(ours, theirs.map(|x| x.as_int()));
        prop_assert_eq!(field::mul(a, b), (theirs[0] * theirs[1]).as_int());
        prop_assert_eq!(field::add(ours[0], ours[1]), (theirs[0] + theirs[1]).as_int());
        prop_assert_eq!(field::sub(ours[0], ours[1]), (theirs[0] - theirs[1]).as_int());
    }
}

#[test]
fn roots_are_those_of_winter_math() {
    for log_n in 1..=ntt::LOG_MOST {
        assert_eq!(field::root(log_n), BaseElement::get_root_of_unity(log_n).as_int());
    }
    let (table, w) = (ntt::roots(), BaseElement::get_root_of_unity(ntt::LOG_MOST));
    let (low, high) = table.split_at(table.len() / 2);
    for (e, (low, high)) in low.iter().zip(high).enumerate() {
        let e = e as u64;
        assert_eq!([*low, *high], [w.exp(e).as_int(), w.exp(e * table.len() as u64 / 2).as_int()]);
    }
}

/// What the kernels make of the coefficients.
fn compute(dev: &Device, coefficients: &[u64]) -> Result<(Vec<u64>, Vec<u32>), Error> {
    let values = ntt::transform(dev, &dev.upload(&ntt::roots())?, dev.upload(coefficients)?)?;
    let tree = merkle::tree(dev, &values)?;
    Ok((dev.download(&values)?, dev.download(&tree)?))
}

/// Each value and each node is the reference's.
fn check(coefficients: &[u64], (values, tree): &(Vec<u64>, Vec<u32>)) {
    assert!(*values == reference::transform(coefficients), "a transform of {}", coefficients.len());
    let (digests, rest) = tree.as_chunks::<8>();
    assert!(rest.is_empty() && digests.len() == coefficients.len() / 2);
    for level in reference::levels(values) {
        assert!(digests[level.len()..][..level.len()] == level, "{} nodes over {}", level.len(), values.len());
    }
}

on_both! {
    1: fn transforms_and_trees_are_those_of_other_crates(gpus) {
        // One pass, two and three; trees of one launch to three.
        let lengths = if gpus.is_cuda() { 2..17_u32 } else { 2..13 };
        let pool = gpus.builder(1).module(&MODULE).build().unwrap();
        let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(support::cases(20, 200)));
        let checked = runner.run(&polynomial(lengths), |coefficients| {
            check(&coefficients, &pool.run(|dev, _| compute(dev, &coefficients)).unwrap()[0]);
            Ok(())
        });
        checked.unwrap();
    }

    1: fn every_length_has_its_passes(gpus) {
        let pool = gpus.builder(1).module(&MODULE).build().unwrap();
        let most = if gpus.is_cuda() { support::cases(20, ntt::LOG_MOST) } else { support::cases(17, 20) };
        for log_n in 2..=most {
            let coefficients: Vec<_> = (0..1_u64 << log_n).map(|i| u64::MAX - i * i).collect();
            check(&coefficients, &pool.run(|dev, _| compute(dev, &coefficients)).unwrap()[0]);
        }
    }

    1: fn lengths_that_do_not_fit_are_refused(gpus) {
        let pool = gpus.builder(1).module(&MODULE).build().unwrap();
        pool.run(|dev, _| {
            let roots = dev.upload(&ntt::roots())?;
            for length in [0, 1, 3, 6] {
                let refused = ntt::transform(dev, &roots, dev.zeros(length)?).unwrap_err();
                assert_eq!(refused.to_string(), format!("a transform of {length} elements"));
            }
            for length in [0, 2, 6, 12] {
                let refused = merkle::tree(dev, &dev.zeros(length)?).unwrap_err();
                assert_eq!(refused.to_string(), format!("a tree over {length} elements"));
            }
            Ok(())
        })
        .unwrap();
    }

    1: fn a_commitment_takes_the_memory_that_is_booked_for_it(gpus) {
        let pool = gpus.builder(1).module(&MODULE).build().unwrap();
        pool.run(|dev, _| {
            let prover = Prover::new(dev)?;
            let before = dev.stats().in_use;
            let coefficients: Vec<_> = (0..1 << 16).collect();
            let root = prover.commit(dev, dev.upload(&coefficients)?)?;
            assert_eq!(root.as_slice()?, reference::commit(&coefficients));
            assert_eq!(dev.stats().peak - before, Prover::bytes(16) as u64);
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn both_halves_give_the_same_bits() {
    if support::cuda_devices() == 0 {
        return println!("skipped: no CUDA device");
    }
    let coefficients: Vec<_> = (0..1_u64 << 18).map(|i| u64::MAX / 3 * i).collect();
    let [host, cuda] = [support::builder().host(1), support::builder().cuda()].map(|builder| {
        let pool = builder.devices(&[0]).module(&MODULE).build().unwrap();
        pool.run(|dev, _| compute(dev, &coefficients)).unwrap().swap_remove(0)
    });
    assert!(host == cuda);
}

#[test]
fn the_program_finds_its_results_right() {
    let test = std::env::current_exe().unwrap();
    let program =
        test.ancestors().nth(2).unwrap().join("examples").join(format!("prove{}", std::env::consts::EXE_SUFFIX));
    assert!(program.is_file(), "{} is not there: build it with `cargo build --example prove`", program.display());
    let picture = std::env::temp_dir().join(format!("prove-{}.svg", std::process::id()));
    let arguments = ["--jobs", "30", "--most", "13", "--threads", "3", "--devices", "2", "--picture"];
    let output = std::process::Command::new(program)
        .args(arguments)
        .arg(&picture)
        .env("GPU_POOL_BACKEND", "host:3")
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.starts_with("30 jobs from 3 threads on 2 x software GPU\n"), "{text}");
    assert!(text.ends_with("all roots are those of winter-math and sha2\n"), "{text}");
    let ended = text.lines().filter_map(|line| line.strip_prefix("device ")?.split_once(": ")?.1.split_once(" jobs"));
    assert_eq!(ended.map(|(jobs, _)| jobs.parse::<u32>().unwrap()).sum::<u32>(), 30, "{text}");
    let svg = std::fs::read_to_string(&picture).unwrap();
    std::fs::remove_file(&picture).unwrap();
    // A bar and its border for each job.
    assert!(svg.matches("<rect").count() >= 60, "{} rectangles", svg.matches("<rect").count());
}
