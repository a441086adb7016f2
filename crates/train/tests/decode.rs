//! `examples/decode`: its words are those of plain loops on the CPU, on any number of devices; its kernels' two halves
//! agree; and the program. `cargo test` builds it; `cargo test --test decode` does not.
#![cfg(feature = "blas")]

#[path = "../../../examples/decode/model/mod.rs"]
#[allow(dead_code, reason = "the program tells how many operations a step has")]
mod model;
#[path = "../../../tests/support/mod.rs"]
mod support;

use gpu_pool::LaunchDims;
use gpu_pool_lab::twins;
use half::bf16;
use model::{
    Config, Decoder, EPS, LLAMA, Model, SMALL, Shape, angles,
    kernels::{HEAD, LONGEST, MODULE, MOST_SHARED, Number, PARTS, weight},
};

const PROMPT: usize = 4;
const NEW: usize = 8;

/// Plain loops in `f64`, one sequence after the other.
struct Reference {
    outer: [Vec<f64>; 3],
    layers: Vec<[Vec<f64>; 9]>,
}

fn filled(shape: Shape) -> Vec<f64> {
    (0..shape.rows * shape.cols).map(|place| f64::from(weight(shape.seed, place, shape.largest))).collect()
}

fn product(w: &[f64], x: &[f64]) -> Vec<f64> {
    w.chunks(x.len()).map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum()).collect()
}

fn normed(x: &[f64], gamma: &[f64]) -> Vec<f64> {
    let squares: f64 = x.iter().map(|x| x * x).sum();
    let by = (squares / x.len() as f64 + f64::from(EPS)).sqrt();
    x.iter().zip(gamma).map(|(x, gamma)| x / by * gamma).collect()
}

/// The first half of a head and the second one are the parts of complex numbers, which are turned.
fn turn(head: &mut [f64], place: usize) {
    for i in 0..HEAD / 2 {
        let (sin, cos) = (place as f64 * 10_000f64.powf(-2.0 * i as f64 / HEAD as f64)).sin_cos();
        let (x, y) = (head[i], head[HEAD / 2 + i]);
        (head[i], head[HEAD / 2 + i]) = (x * cos - y * sin, x * sin + y * cos);
    }
}

fn add(to: &mut [f64], from: &[f64]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
}

impl Reference {
    fn new(config: &Config) -> Self {
        let layers = (0..config.layers).map(|index| config.layer(index).map(filled)).collect();
        Reference { outer: config.outer().map(filled), layers }
    }

    /// The prompt, and `new` words behind it.
    fn words(&self, config: &Config, prompt: &[u32], new: usize) -> Vec<u32> {
        let (mut words, mut caches) = (prompt.to_vec(), vec![(Vec::new(), Vec::new()); config.layers]);
        for place in 0..prompt.len() + new - 1 {
            let word = words[place] as usize;
            let mut residual = self.outer[0][word * config.width..][..config.width].to_vec();
            let mut x = normed(&residual, &self.outer[1]);
            for ([q, k, v, o, gate, up, down, between, after], (keys, values)) in self.layers.iter().zip(&mut caches) {
                let (mut q, mut k) = (product(q, &x), product(k, &x));
                q.chunks_mut(HEAD).chain(k.chunks_mut(HEAD)).for_each(|head| turn(head, place));
                keys.push(k);
                values.push(product(v, &x));
                let mixed = q.chunks(HEAD).enumerate().flat_map(|(h, q)| {
                    let own = h / (config.heads / config.kv_heads) * HEAD..;
                    let key = |k: &Vec<f64>| q.iter().zip(&k[own.clone()]).map(|(q, k)| q * k).sum::<f64>();
                    let shares: Vec<f64> = keys.iter().map(|k| (key(k) / (HEAD as f64).sqrt()).exp()).collect();
                    let all: f64 = shares.iter().sum();
                    let mut sum = vec![0.0; HEAD];
                    for (share, value) in shares.iter().zip(values.iter()) {
                        sum.iter_mut().zip(&value[own.clone()]).for_each(|(sum, v)| *sum += share / all * v);
                    }
                    sum
                });
                add(&mut residual, &product(o, &mixed.collect::<Vec<_>>()));
                x = normed(&residual, between);
                let inner = product(gate, &x).into_iter().zip(product(up, &x));
                let inner: Vec<f64> = inner.map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up).collect();
                add(&mut residual, &product(down, &inner));
                x = normed(&residual, after);
            }
            if place + 1 == words.len() {
                let logits = product(&self.outer[2], &x);
                words.push((0..config.words).fold(0, |best, i| if logits[i] > logits[best] { i } else { best }) as u32);
            }
        }
        words
    }
}

on_both! {
    1: fn words_are_those_of_plain_loops(gpus) {
        let (prompts, reference) = (SMALL.prompts(2, PROMPT), Reference::new(&SMALL));
        let want: Vec<_> = prompts.iter().map(|prompt| reference.words(&SMALL, prompt, NEW)).collect();
        for devices in 1..=gpus.up_to(3) {
            let pool = gpus.builder(devices).module(&MODULE).build().unwrap();
            let found = pool.run(|dev, shard| {
                let longest = PROMPT + NEW;
                let mut decoder = Decoder::<f32>::new(dev, Model::new(dev, &shard, &SMALL)?, &prompts[..1], longest)?;
                decoder.advance(dev, PROMPT + NEW - 1)?;
                let alone = decoder.words(dev)?;
                let mut decoder = decoder.with(dev, &prompts, longest)?;
                // The words of the last turn are no part of the next one.
                decoder.advance(dev, PROMPT + 3)?;
                decoder.rewind(dev)?;
                decoder.advance(dev, PROMPT + NEW - 1)?;
                Ok((alone, decoder.words(dev)?))
            }).unwrap();
            for (alone, words) in found {
                assert_eq!(words, want, "{devices} devices");
                assert_eq!(alone, want[..1], "{devices} devices");
            }
        }
    }

    1: fn half_types_write_the_same_words_on_all_devices(gpus) {
        let prompts = SMALL.prompts(2, PROMPT);
        let devices = gpus.up_to(2);
        let pool = gpus.builder(devices).module(&MODULE).build().unwrap();
        let found = pool.run(|dev, shard| {
            let model = Model::new(dev, &shard, &SMALL)?;
            let mut decoder = Decoder::<bf16>::new(dev, model, &prompts, PROMPT + NEW)?;
            decoder.advance(dev, PROMPT + NEW - 1)?;
            decoder.words(dev)
        }).unwrap();
        for words in &found {
            assert_eq!(*words, found[0]);
            assert!(words.iter().zip(&prompts).all(|(words, prompt)| words.starts_with(prompt)));
        }
    }

    1: fn what_does_not_fit_is_refused(gpus) {
        let pool = gpus.builder(1).module(&MODULE).build().unwrap();
        let refused = |config: Config, prompts: &[Vec<u32>], longest| {
            let made = pool.run(|dev, shard| {
                Decoder::<f32>::new(dev, Model::new(dev, &shard, &config)?, prompts, longest).map(drop)
            });
            made.unwrap_err().to_string()
        };
        let one = SMALL.prompts(1, 4);
        assert!(refused(Config { heads: 5 * (MOST_SHARED + 1), ..SMALL }, &one, 9).contains("the kernels do not fit"));
        assert!(refused(Config { width: 254, ..SMALL }, &one, 9).contains("the kernels do not fit"));
        assert!(refused(Config { kv_heads: 0, heads: 0, ..SMALL }, &one, 9).contains("the kernels do not fit"));
        assert!(refused(SMALL, &[vec![509]], 9).contains("words are known"));
        assert!(refused(SMALL, &[vec![1], vec![1, 2]], 9).contains("equally long"));
        assert!(refused(SMALL, &one, 4).contains("a prompt of 4 words, and 4 words in all"));
        assert!(refused(SMALL, &one, LONGEST + 1).contains("words in all"));
        let too_far = pool.run(|dev, shard| {
            let mut decoder = Decoder::<f32>::new(dev, Model::new(dev, &shard, &SMALL)?, &one, 9)?;
            decoder.advance(dev, 8)?;
            decoder.advance(dev, 1)
        });
        assert!(too_far.unwrap_err().to_string().contains("there is room for 9 words"));
    }
}

/// Numbers between -0.5 and 0.5.
fn numbers<T: Number>(len: usize, seed: u32) -> Vec<T> {
    (0..len).map(|i| T::rounded(weight(seed, i, 0.5))).collect()
}

fn dims(grid: (usize, usize), threads: u32) -> LaunchDims {
    LaunchDims { grid: (grid.0 as u32, grid.1 as u32, 1), block: (threads, 1, 1), shared_bytes: 0 }
}

/// The device code of every kernel against its Rust half.
fn both_halves_agree<T: Number>(tolerance: f64) {
    let (batch, groups, shared, longest) = (3, 2, 3, 700);
    let (rows, cols) = (batch * groups, longest * HEAD);
    // SAFETY: the buffers have the lengths that the launches of the model have.
    unsafe {
        twins(T::weights(), dims((7, 1), 256), (numbers::<T>(5000, 1), 9, 5000, 70, 3, 5, 100, 0.3), 0.0);
        for place in [2u32, 3] {
            let best = (0..batch * PARTS).map(|i| (i as u64 * 7919 % 64) << 32 | u64::from(!(i as u32 % 10)));
            let best = best.collect::<Vec<_>>();
            let given = vec![5u32; batch * 4];
            let args = (best, numbers::<T>(20 * 48, 2), given, vec![place], numbers::<T>(batch * 48, 3), 3, 48);
            twins(T::next_word(), dims((batch, 1), 256), args, 0.0);
        }
        for place in [0u32, 1, 63, 64, 511, 512, 699] {
            let angles = (0..longest).flat_map(angles).collect::<Vec<_>>();
            let qkv = numbers::<T>(batch * groups * (shared + 2) * HEAD, 4);
            let keys = numbers::<T>(rows * cols, 5);
            // Of one sign: a relative error says nothing about a sum near zero.
            let values = numbers::<T>(rows * cols, 6).iter().map(|x| T::rounded(x.value() + 1.0)).collect::<Vec<_>>();
            let mixed = numbers::<T>(rows * shared * HEAD, 7);
            let args = (qkv, angles, vec![place], keys, values, mixed, shared as u32, longest as u32);
            twins(T::attend(), dims((groups, batch), 512), args, 10.0 * tolerance);
        }
        let args = (numbers::<T>(batch * 2 * 515, 8), numbers::<T>(batch * 515, 9), 515);
        twins(T::swiglu(), dims((3, batch), 256), args, tolerance);
        for words in [1usize, 31, 509, 9000] {
            // Many are the same.
            let logits = (0..batch * words).map(|i| T::rounded((i * 7919 % 13) as f32 - 6.0)).collect::<Vec<_>>();
            let args = (logits, vec![1u64; batch * PARTS], vec![4u32], words as u32, 1000);
            twins(T::best_word(), dims((PARTS, batch), 256), args, 0.0);
        }
    }
}

#[test]
fn both_halves_agree_cuda() {
    both_halves_agree::<f32>(1e-5);
    both_halves_agree::<bf16>(1e-2);
}

#[test]
fn the_large_model_is_llama() {
    let all: usize = (0..LLAMA.layers).flat_map(|index| LLAMA.layer(index)).map(|shape| shape.rows * shape.cols).sum();
    let outer: usize = LLAMA.outer().iter().map(|shape| shape.rows * shape.cols).sum();
    // Llama 3 8B has 8,030,261,248 weights in 32 layers.
    assert_eq!(all * 4 + outer, 8_030_261_248);
}

#[test]
fn the_program_writes_the_same_words_from_one_and_from_two_devices() {
    let test = std::env::current_exe().unwrap();
    let name = format!("examples/decode{}", std::env::consts::EXE_SUFFIX);
    let program = test.ancestors().nth(2).unwrap().join(name);
    assert!(program.is_file(), "{} is not there: build it with `cargo build --example decode`", program.display());
    let texts = ["1", "2"].map(|devices| {
        let mut command = std::process::Command::new(&program);
        command.args(["--batch", "2", "--words", "10", "--devices", devices]).env("GPU_POOL_BACKEND", "host:3");
        let output = command.output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
        assert!(text.contains(&format!("{devices} devices, ")) && text.contains("words/s"), "{text}");
        text
    });
    let [one, two] = texts.each_ref().map(|text| text.lines().find(|line| line.starts_with('[')).unwrap());
    assert_eq!(one, two);
}
