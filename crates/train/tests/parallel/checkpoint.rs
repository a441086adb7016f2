//! Checkpoints: what is saved is loaded bit for bit.

use crate::{
    data_parallel::rig::{Bag, Real, backward, bag, bags, bits, step, weights},
    on_both,
    support::{Gpus, again, cases, failure, task, until},
};
use gpu_pool::{Device, Error};
use gpu_pool_train::{Checkpoint, DataParallel, Optimizer, Parameter};
use half::{bf16, f16};
use proptest::prelude::*;
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

/// Parameters over several buckets and parts; one is empty.
const SIZES: [usize; 5] = [5000, 3, 0, 2049, 64];

/// A folder that goes with its test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("gpu-pool-{}-{name}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn names(&self) -> Vec<String> {
        let mut names: Vec<_> =
            fs::read_dir(&self.0).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn folder(gpus: Gpus, name: &str) -> Folder {
    Folder::new(&format!("{name}-{}", if gpus.is_cuda() { "cuda" } else { "host" }))
}

fn optimizers() -> [Optimizer; 3] {
    [Optimizer::sgd(0.1), Optimizer::sgd(0.1).momentum(0.9).clip(2.0), Optimizer::adam_w(0.1).clip(0.5).warm_up(4)]
}

fn same_tensors<T: Parameter>(a: &Checkpoint, b: &Checkpoint) {
    assert!(a.names().eq(b.names()), "{a:?} {b:?}");
    for name in a.names() {
        if name.starts_with("parameters") {
            assert!(bits(&a.tensor::<T>(name).unwrap()) == bits(&b.tensor::<T>(name).unwrap()), "{name}");
        } else {
            assert!(bits(&a.tensor::<f32>(name).unwrap()) == bits(&b.tensor::<f32>(name).unwrap()), "{name}");
        }
    }
}

/// Six steps are three, a file, and three more, also where the state is in parts on other numbers of devices meanwhile.
fn goes_on<T: Real>(gpus: Gpus, n: usize, file: &Path) {
    let (pool, other) = (gpus.pool(n), gpus.pool(gpus.up_to(n + 1)));
    for optimizer in optimizers() {
        let optimizer = optimizer.bucket_bytes(9000);
        for (before, after) in [(optimizer, optimizer.sharded()), (optimizer.sharded(), optimizer)] {
            let new = |pool, optimizer, seed| bags::<T>(pool, optimizer, &SIZES, seed);
            let mut straight = new(&pool, before, 0);
            for number in 0..3 {
                step(&mut straight, &SIZES, number, 6).unwrap();
            }
            straight.save(file).unwrap();
            // Through another number of devices, with the state divided in another way.
            let mut between = new(&other, after, 1);
            between.load(file).unwrap();
            between.verify().unwrap();
            assert_eq!(between.steps(), 3);
            same_tensors::<T>(&Checkpoint::load(file).unwrap(), &between.checkpoint().unwrap());
            between.save(file).unwrap();
            let mut resumed = new(&pool, before, 2);
            step(&mut resumed, &SIZES, 50, 6).unwrap();
            resumed.load(file).unwrap();
            for number in 3..6 {
                step(&mut straight, &SIZES, number, 6).unwrap();
                step(&mut resumed, &SIZES, number, 6).unwrap();
            }
            assert_eq!(resumed.steps(), 6);
            resumed.verify().unwrap();
            same_tensors::<T>(&straight.checkpoint().unwrap(), &resumed.checkpoint().unwrap());
            let (straight, resumed) = (weights(&mut straight).unwrap(), weights(&mut resumed).unwrap());
            assert!(straight.iter().zip(&resumed).all(|(a, b)| bits(a) == bits(b)), "{optimizer:?}");
        }
    }
}

on_both! {
    1: fn training_goes_on_with_the_same_bits(gpus) {
        let folder = folder(gpus, "goes-on");
        goes_on::<f32>(gpus, 1, &folder.file("one"));
        goes_on::<f32>(gpus, gpus.up_to(3), &folder.file("three"));
        goes_on::<bf16>(gpus, gpus.up_to(2), &folder.file("bf16"));
        assert_eq!(folder.names(), ["bf16", "one", "three"], "temporary files are left");
    }

    // Files that are cut off, damaged, of other programs or of other models: errors that name what is wrong, before
    // anything has changed.
    1: fn wrong_files_change_nothing(gpus) {
        let folder = folder(gpus, "wrong");
        let (file, right) = (folder.file("wrong"), folder.file("right"));
        let pool = gpus.pool(gpus.up_to(2));
        let new = |optimizer, sizes: &'static [usize]| bags::<f32>(&pool, optimizer, sizes, 0);
        let mut model = new(Optimizer::adam(0.1), &[30, 4]);
        step(&mut model, &[30, 4], 0, 4).unwrap();
        model.save(&right).unwrap();
        let bytes = fs::read(&right).unwrap();
        step(&mut model, &[30, 4], 1, 4).unwrap();
        let before = weights(&mut model).unwrap();
        let mut refused = |wanted: &str| {
            let error = failure(model.load(&file));
            let Error::InvalidArgument { site, .. } = &error else { panic!("{error}") };
            let text = error.to_string();
            assert!(text.contains(wanted) && site.file().ends_with("checkpoint.rs"), "{text:?} has no {wanted:?}");
            assert!(bits(&weights(&mut model).unwrap()[0]) == bits(&before[0]) && model.steps() == 2);
        };
        for len in (0..bytes.len()).step_by(bytes.len() / 20).chain([7, 8, 9, bytes.len() - 1]) {
            fs::write(&file, &bytes[..len]).unwrap();
            refused("truncated");
        }
        for foreign in [&b"PK\x03\x04 this is a zip file, as torch.save writes it"[..], &[0xff; 64]] {
            fs::write(&file, foreign).unwrap();
            refused("no checkpoint");
        }
        let mut other = Checkpoint::new();
        other.insert("parameters.0", &[30], &[0.0f32; 30]).unwrap();
        other.save(&file).unwrap();
        refused("number of steps");
        for (optimizer, sizes, wanted) in [
            (Optimizer::adam(0.1), &[30, 5][..], "`parameters.1` has 5 elements, and the model's has 4"),
            (Optimizer::adam(0.1), &[30], "`parameters.1`"),
            (Optimizer::adam(0.1), &[30, 4, 1], "has 9 tensors of a model, and this model has 6"),
            (Optimizer::sgd(0.1), &[30, 4], "`first.0`"),
            (Optimizer::sgd(0.1).momentum(0.5), &[30, 4], "`second.0`"),
        ] {
            new(optimizer, sizes).save(&file).unwrap();
            refused(wanted);
        }
        let mut halves = bags::<f16>(&pool, Optimizer::adam(0.1), &[30, 4], 0);
        halves.save(&file).unwrap();
        refused("`parameters.0` is of F16, not of F32");
        let mut long = Checkpoint::load(&right).unwrap();
        long.note("gpu_pool.steps", u64::MAX);
        long.save(&file).unwrap();
        refused("18446744073709551615 steps: at most 2^53");
        // The right one still works.
        fs::copy(&right, &file).unwrap();
        model.load(&file).unwrap();
        assert_eq!(model.steps(), 1);
        let error = failure(model.load(folder.file("nowhere")));
        assert!(matches!(&error, Error::Custom(why) if why.to_string().contains("nowhere")), "{error}");
    }

    // A step that has failed in its update is repaired by a checkpoint.
    2: fn a_checkpoint_repairs_a_poisoned_model(gpus) {
        let folder = folder(gpus, "repair");
        let file = folder.file("file");
        let pool = gpus.pool(2);
        for optimizer in [Optimizer::adam(0.1), Optimizer::adam(0.1).sharded()] {
            let mut model = bags::<f32>(&pool, optimizer, &[3000], 0);
            step(&mut model, &[3000], 0, 4).unwrap();
            model.save(&file).unwrap();
            let saved = weights(&mut model).unwrap();
            // One replica is written, and then the other device fails.
            let error = failure(model.each(|dev, bag| {
                if dev.rank() == 0 {
                    dev.fill(&mut bag.0[0], 1.0)?;
                }
                dev.barrier()?;
                if dev.rank() == 0 { Ok(()) } else { Err(Error::custom("the other device fails")) }
            }));
            assert!(error.to_string().contains("the other device fails"));
            assert!(matches!(failure(model.save(&file)), Error::Poisoned { .. }));
            assert!(matches!(failure(model.clear_poison()), Error::Mismatch { what: "parameters", .. }));
            model.load(&file).unwrap();
            assert!(weights(&mut model).unwrap().iter().all(|own| bits(own) == bits(&saved[0])));
            step(&mut model, &[3000], 1, 4).unwrap();
            model.verify().unwrap();
        }
    }

    4: fn groups_have_states_of_their_own(gpus) {
        let folder = folder(gpus, "groups");
        let file = folder.file("file");
        let pool = gpus.pool(4);
        // Two stages of different sizes, each on two devices.
        let sizes = |rank: usize| if rank.is_multiple_of(2) { &[5000, 3][..] } else { &[2500][..] };
        let new = |optimizer: Optimizer| {
            let group = |rank: usize| [rank % 2, rank % 2 + 2];
            let build = |dev: &Device| bag::<f32>(dev, sizes(dev.rank()), 0);
            DataParallel::new_in(&pool, |dev| dev.group(&group(dev.rank())), optimizer, build).unwrap()
        };
        let step = |model: &mut DataParallel<Bag>, number| {
            let pass = model.step(4, |dev, shard, _, gradients| {
                backward(gradients, dev, sizes(dev.rank()), number, shard.range(4).len())
            });
            pass.unwrap()
        };
        let (mut model, mut resumed) = (new(Optimizer::adam(0.1)), new(Optimizer::adam(0.1).sharded()));
        step(&mut model, 0);
        model.save(&file).unwrap();
        resumed.load(&file).unwrap();
        step(&mut model, 1);
        step(&mut resumed, 1);
        let (model, resumed) = (weights(&mut model).unwrap(), weights(&mut resumed).unwrap());
        assert!(model.iter().zip(&resumed).all(|(a, b)| bits(a) == bits(b)));
        assert!(Checkpoint::load(&file).unwrap().names().any(|name| name == "group1.second.0"));
        let mut alone = bags::<f32>(&pool, Optimizer::adam(0.1), sizes(0), 0);
        assert!(failure(alone.load(&file)).to_string().contains("`parameters.0`"));
    }
}

/// Every type, any shape; what cannot be written leaves nothing behind, and the old file where it was.
#[test]
fn tensors_of_any_type() {
    let folder = Folder::new("tensors");
    let file = folder.file("file");
    let mut checkpoint = Checkpoint::new();
    checkpoint.insert("a", &[2, 3], &[1.5f32, -0.0, f32::NAN, 4.0, 5.0, 6.0]).unwrap();
    checkpoint.insert("b", &[], &[7u8]).unwrap();
    checkpoint.insert("c", &[0, 4], &[0i64; 0]).unwrap();
    checkpoint.insert("d", &[1], &[f64::MIN_POSITIVE]).unwrap();
    checkpoint.insert("e", &[3], &[f16::ONE; 3]).unwrap();
    checkpoint.insert("f", &[1], &[u64::MAX]).unwrap();
    checkpoint.insert("d", &[1], &[bf16::ONE]).unwrap();
    checkpoint.note("epoch", 7);
    checkpoint.note("text", "line\n\"quoted\"");
    assert!(failure(checkpoint.insert("g", &[2, 2], &[0.0f32; 5])).to_string().contains("5 elements"));
    assert!(failure(checkpoint.insert("g", &[usize::MAX, 2], &[0u8; 5])).to_string().contains("`g`"));
    checkpoint.save(&file).unwrap();

    let found = Checkpoint::load(&file).unwrap();
    assert!(found.names().eq(["a", "b", "c", "d", "e", "f"]));
    assert!(bits(&found.tensor::<f32>("a").unwrap()) == bits(&checkpoint.tensor::<f32>("a").unwrap()));
    assert_eq!(
        (found.shape("a").unwrap(), found.shape("b").unwrap(), found.shape("c").unwrap()),
        (&[2, 3][..], &[][..], &[0, 4][..])
    );
    assert_eq!(found.tensor::<u8>("b").unwrap(), [7]);
    assert!(found.tensor::<i64>("c").unwrap().is_empty());
    assert_eq!(found.tensor::<bf16>("d").unwrap(), [bf16::ONE]);
    assert_eq!(found.tensor::<u64>("f").unwrap(), [u64::MAX]);
    assert_eq!(
        (found.noted("epoch"), found.noted("text"), found.noted("none")),
        (Some("7"), Some("line\n\"quoted\""), None)
    );
    assert!(failure(found.tensor::<f32>("d")).to_string().contains("`d` is of BF16, not of F32"));
    assert!(failure(found.tensor::<f32>("none")).to_string().contains("no tensor `none`"));
    // What was loaded can be saved again.
    found.save(&file).unwrap();
    assert!(Checkpoint::load(&file).unwrap().names().eq(found.names()));

    fs::create_dir(folder.file("taken")).unwrap();
    fs::write(folder.file("taken").join("x"), "").unwrap();
    for wrong in [folder.file("taken"), folder.file("nowhere").join("file")] {
        let error = failure(found.save(&wrong));
        assert!(error.to_string().contains(wrong.to_str().unwrap()), "{error}");
    }
    assert_eq!(folder.names(), ["file", "taken"]);
}

/// Tensors of one number each, which a torn file would not have.
fn uniform(value: u32, len: usize) -> Checkpoint {
    let mut checkpoint = Checkpoint::new();
    checkpoint.insert("a", &[len], &vec![value; len]).unwrap();
    checkpoint.insert("b", &[len], &vec![f64::from(value); len]).unwrap();
    checkpoint.note("value", value);
    checkpoint
}

#[track_caller]
fn assert_uniform(file: &Path) -> u32 {
    let found = Checkpoint::load(file).unwrap();
    let (a, b) = (found.tensor::<u32>("a").unwrap(), found.tensor::<f64>("b").unwrap());
    assert!(a.iter().all(|x| *x == a[0]) && b.iter().all(|x| *x == f64::from(a[0])), "torn");
    assert_eq!(found.noted("value"), Some(a[0].to_string().as_str()));
    a[0]
}

/// `save <file> <value> <elements> <times>`, with 0 for ever.
#[test]
fn the_process_that_saves() {
    let Some(task) = task() else { return };
    let words: Vec<_> = task.split(' ').collect();
    let [file, numbers @ ..] = &words[..] else { panic!("{task}") };
    let [value, len, times] = numbers.iter().map(|x| x.parse().unwrap()).collect::<Vec<u32>>()[..] else { panic!() };
    let checkpoint = uniform(value, len as usize);
    for _ in 0..if times == 0 { u32::MAX } else { times } {
        checkpoint.save(file).unwrap();
    }
}

fn saver(file: &Path, value: u32, len: usize, times: u32) -> std::process::Child {
    let task = format!("{} {value} {len} {times}", file.display());
    again(&["checkpoint::the_process_that_saves"], &task).stdout(std::process::Stdio::null()).spawn().unwrap()
}

fn is_part(name: &str) -> bool {
    name.ends_with(".part")
}

/// The process is killed while its temporary file is there. Once the temporary file of the next process with this
/// number had the same name.
#[test]
fn a_killed_save_leaves_the_old_file_and_the_next_one_clears_up() {
    let folder = Folder::new("killed");
    let file = folder.file("file");
    uniform(7, 1000).save(&file).unwrap();
    let mut left = 0;
    for round in 0..cases(4, 40) {
        let mut child = saver(&file, round, 200_000, 0);
        until("it saves", || folder.names().iter().any(|name| is_part(name))).unwrap();
        std::thread::sleep(std::time::Duration::from_micros(300 * u64::from(round)));
        child.kill().unwrap();
        child.wait().unwrap();
        left += folder.names().iter().filter(|name| is_part(name)).count();
        let value = assert_uniform(&file);
        assert!(value == 7 || value <= round, "{value}");
        uniform(7, 1000).save(&file).unwrap();
        assert_eq!(folder.names(), ["file"]);
    }
    println!("{left} temporary files were left");
}

/// Threads and processes that save to one path, and a reader: every save works, and nobody sees a torn file.
#[test]
fn many_save_at_once() {
    let folder = Folder::new("many");
    let file = &folder.file("file");
    uniform(0, 20_000).save(file).unwrap();
    let mut children = [saver(file, 1, 20_000, 10), saver(file, 2, 20_000, 10)];
    std::thread::scope(|scope| {
        let savers: Vec<_> = (3..5)
            .map(|value| scope.spawn(move || (0..10).for_each(|_| uniform(value, 20_000).save(file).unwrap())))
            .collect();
        while !savers.iter().all(|saver| saver.is_finished()) {
            assert_uniform(file);
        }
    });
    assert!(children.iter_mut().all(|child| child.wait().unwrap().success()));
    uniform(9, 20_000).save(file).unwrap();
    assert_eq!((assert_uniform(file), folder.names()), (9, vec!["file".to_owned()]));
}

#[cfg(unix)]
mod unix {
    use super::*;
    use std::os::{
        fd::AsRawFd,
        unix::fs::{PermissionsExt, symlink},
    };

    fn mode(file: &Path) -> u32 {
        fs::metadata(file).unwrap().permissions().mode() & 0o7777
    }

    #[test]
    fn a_planted_link_is_not_followed() {
        let folder = Folder::new("planted");
        let (file, victim) = (folder.file("file"), folder.file("victim"));
        fs::write(&victim, "precious").unwrap();
        // The names of before, and one of now.
        for number in 0..2000 {
            symlink(&victim, folder.file(&format!("file.{}-{number}.part", std::process::id()))).unwrap();
        }
        let planted = folder.file(".gpu-pool-0123456789abcdef.part");
        symlink(&victim, &planted).unwrap();
        uniform(1, 10).save(&file).unwrap();
        assert_eq!(fs::read_to_string(&victim).unwrap(), "precious");
        assert_eq!((fs::read_link(&planted).unwrap(), assert_uniform(&file)), (victim, 1));
        assert_eq!(folder.names().len(), 2003);
    }

    #[test]
    fn the_mode_is_kept() {
        let folder = Folder::new("mode");
        let (file, other) = (folder.file("file"), folder.file("other"));
        fs::write(&other, "").unwrap();
        uniform(1, 10).save(&file).unwrap();
        assert_eq!(mode(&file), mode(&other), "the mode of a new file");
        for wanted in [0o640, 0o600, 0o444, 0o666] {
            fs::set_permissions(&file, fs::Permissions::from_mode(wanted)).unwrap();
            uniform(wanted, 10).save(&file).unwrap();
            assert_eq!((mode(&file), assert_uniform(&file)), (wanted, wanted));
        }
    }

    /// A link stays, and what it leads to is replaced: `latest` is the name of another file.
    #[test]
    fn a_link_is_written_through() {
        let folder = Folder::new("link");
        fs::create_dir(folder.file("steps")).unwrap();
        let (latest, step) = (folder.file("latest"), folder.file("steps/step5"));
        symlink("newest", &latest).unwrap();
        symlink("steps/step5", folder.file("newest")).unwrap();
        // First it leads nowhere.
        for value in [1, 2] {
            uniform(value, 10).save(&latest).unwrap();
            assert_eq!((assert_uniform(&step), assert_uniform(&latest)), (value, value));
            assert!(fs::symlink_metadata(&step).unwrap().is_file());
            assert_eq!(fs::read_link(&latest).unwrap(), Path::new("newest"));
        }
        assert_eq!(folder.names(), ["latest", "newest", "steps"]);
        symlink("round", folder.file("round")).unwrap();
        for (wrong, wanted) in [("round", "links"), ("steps", "no regular file")] {
            let error = failure(uniform(1, 10).save(folder.file(wrong))).to_string();
            assert!(error.contains(wrong) && error.contains(wanted), "{error}");
        }
    }

    /// What a dead writer has left is removed, for whatever checkpoint it was; what a live one has, and files with
    /// other names are not.
    #[test]
    fn only_the_files_of_dead_writers_are_removed() {
        let folder = Folder::new("stale");
        let (dead, live) = (".gpu-pool-aaaaaaaaaaaaaaaa.part", ".gpu-pool-bbbbbbbbbbbbbbbb.part");
        let others = [".gpu-pool-short.part", "gpu-pool-aaaaaaaaaaaaaaaa.part"];
        for name in [dead, live].iter().chain(&others) {
            fs::write(folder.file(name), "half").unwrap();
        }
        let writer = fs::File::open(folder.file(live)).unwrap();
        // SAFETY: an open file.
        assert_eq!(unsafe { libc::flock(writer.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) }, 0);
        uniform(1, 10).save(folder.file("file")).unwrap();
        assert_eq!(folder.names(), [live, others[0], "file", others[1]]);
        drop(writer);
        uniform(2, 10).save(folder.file("file")).unwrap();
        assert_eq!(folder.names(), [others[0], "file", others[1]]);
    }

    #[test]
    fn long_names_of_files() {
        let folder = Folder::new("long");
        for len in [250, 255] {
            let file = folder.file(&"x".repeat(len));
            uniform(len as u32, 10).save(&file).unwrap();
            uniform(len as u32, 10).save(&file).unwrap();
            assert_eq!(assert_uniform(&file), len as u32);
        }
        assert_eq!(folder.names().len(), 2);
    }
}

#[test]
fn the_name_of_the_notes_is_refused() {
    let mut checkpoint = Checkpoint::new();
    match failure(checkpoint.insert("__metadata__", &[1], &[1u8])) {
        Error::InvalidArgument { op: "Checkpoint::insert", why, site, .. } => {
            assert!(why.contains("__metadata__") && site.file().ends_with("checkpoint.rs"), "{why} {site}");
        }
        error => panic!("{error}"),
    }
    // Longer than a header may be: refused when it is saved, since it could not be loaded.
    checkpoint.note("long", "x".repeat(100_000_001));
    let folder = Folder::new("header");
    assert!(matches!(failure(checkpoint.save(folder.file("file"))), Error::InvalidArgument { .. }));
    assert!(folder.names().is_empty());
}

/// Names that formats and systems trip over.
fn name() -> impl Strategy<Value = String> {
    let odd = ["", "\0", "a\0b", "__metadata__", "__metadata__ ", "\u{feff}", "\"\\", "dtype", "é", "e\u{301}", "../x"];
    let long = (1..4000usize).prop_map(|len| "n".repeat(len));
    prop_oneof![prop::sample::select(odd.map(str::to_owned).to_vec()), long, any::<String>()]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(24, 500), failure_persistence: None, ..Default::default() })]

    /// Also names that come twice, of which the last one counts.
    #[test]
    fn what_save_accepts_load_reads(
        tensors in prop::collection::vec((name(), 0..4usize, 0..3u8), 0..6),
        notes in prop::collection::vec((name(), any::<String>()), 0..4),
    ) {
        let folder = Folder::new("any-name");
        let (mut checkpoint, mut wanted) = (Checkpoint::new(), BTreeMap::new());
        for (at, (name, len, kind)) in tensors.iter().enumerate() {
            let x: Vec<u8> = (0..*len).map(|i| (i + at) as u8).collect();
            let wide: Vec<i64> = x.iter().map(|x| i64::from(*x)).collect();
            let kept = match kind {
                0 => checkpoint.insert(name, &[*len], &x),
                1 => checkpoint.insert(name, &[1, *len], &wide),
                _ => checkpoint.insert(name, &[0, *len, usize::MAX >> 8], &[0.0f32; 0]),
            };
            prop_assert_eq!(kept.is_ok(), name != "__metadata__", "{:?}", name);
            if kept.is_ok() {
                wanted.insert(name.clone(), (*kind, wide));
            }
        }
        let texts: BTreeMap<_, _> = notes.iter().cloned().collect();
        notes.iter().for_each(|(name, text)| checkpoint.note(name, text));
        let file = folder.file("file");
        checkpoint.save(&file).unwrap();
        let found = Checkpoint::load(&file).unwrap();
        prop_assert!(found.names().eq(wanted.keys()));
        for (name, (kind, values)) in &wanted {
            match kind {
                0 => prop_assert!(found.tensor::<u8>(name).unwrap().iter().map(|x| i64::from(*x)).eq(values.clone())),
                1 => prop_assert_eq!(&found.tensor::<i64>(name).unwrap(), values),
                _ => prop_assert!(found.tensor::<f32>(name).unwrap().is_empty()),
            }
        }
        for (name, text) in &texts {
            prop_assert_eq!(found.noted(name), Some(text.as_str()));
        }
    }
}
