//! The main job, run as a user runs it: `examples/train_digits` as a process of its own.
//!
//! `cargo test` builds the examples with the tests, next to them. `cargo test --test train_digits` does not: build the
//! example first (`cargo build --example train_digits`), or an old one is tested.
#![cfg(feature = "blas")]

#[path = "../../../examples/train_digits/data.rs"]
#[allow(dead_code, reason = "of the example's module this test takes the reader alone")]
mod data;
#[path = "../../../examples/train_digits/rng.rs"]
#[allow(dead_code, reason = "what the module above needs")]
mod rng;

use flate2::{Compression, write::GzEncoder};
use proptest::prelude::*;
use std::{
    env, fs,
    io::{Cursor, Read, Write, repeat},
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    sync::OnceLock,
};

/// The built example.
fn example() -> PathBuf {
    let test = env::current_exe().unwrap();
    let profile = test.ancestors().nth(2).unwrap();
    let program = profile.join("examples").join(format!("train_digits{}", env::consts::EXE_SUFFIX));
    assert!(
        program.is_file(),
        "{} is not there: build it with `cargo build --example train_digits`",
        program.display()
    );
    program
}

/// Runs it in an empty folder, with software GPUs, whatever the machine has.
fn train(arguments: &[&str]) -> Output {
    command(arguments).output().unwrap()
}

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(example());
    for variable in ["GPU_POOL_BACKEND", "GPU_POOL_DEVICES", "GPU_POOL_TIMEOUT", "GPU_POOL_SEED", "GPU_POOL_FAULTS"] {
        command.env_remove(variable);
    }
    // It must not raise false alarms, either.
    command.env("GPU_POOL_CHECK", "races");
    command.args(["--backend", "host"]).args(arguments).current_dir(folder("cwd"));
    command
}

/// Whether `GPU_POOL_LONG=1` asks for long runs.
fn long() -> bool {
    env::var("GPU_POOL_LONG").is_ok_and(|long| long == "1")
}

/// Cases of a property.
fn cases(usual: u32) -> u32 {
    if long() { 100 * usual } else { usual }
}

/// A folder of this test's own.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("train_digits").join(name);
    fs::create_dir_all(&folder).unwrap();
    folder
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// What a run that must succeed printed.
fn succeeds(arguments: &[&str]) -> String {
    let output = train(arguments);
    assert!(output.status.success(), "{arguments:?} failed: {}", text(&output.stderr));
    text(&output.stdout)
}

/// A run that must fail, saying so in words, without a panic.
fn fails(arguments: &[&str], words: &[&str]) {
    let output = train(arguments);
    let said = text(&output.stderr);
    assert!(!output.status.success(), "{arguments:?} succeeded: {}", text(&output.stdout));
    assert!(output.status.code().is_some_and(|code| code == 1 || code == 2), "{arguments:?}: {}", output.status);
    for word in words {
        assert!(said.contains(word), "{arguments:?}: `{word}` is not in: {said}");
    }
    assert!(!said.contains("panicked"), "{said}");
}

/// The word after `key` in the output.
fn value<'a>(output: &'a str, key: &str) -> &'a str {
    let (_, rest) = output.split_once(key).unwrap_or_else(|| panic!("`{key}` is not in: {output}"));
    rest.split_whitespace().next().unwrap()
}

/// A short training that reaches what `--check` demands: few epochs at a high learning rate.
const SHORT: [&str; 6] = ["--epochs", "6", "--lr", "0.7", "--batch", "64"];

/// What it prints on four devices of one process; two tests need it.
fn short_on_four() -> &'static str {
    static OUTPUT: OnceLock<String> = OnceLock::new();
    OUTPUT.get_or_init(|| succeeds(&[&["--devices", "4", "--check"], &SHORT[..]].concat()))
}

/// The whole promise on this many devices: in a short training, or with `GPU_POOL_LONG=1` in one as by default.
fn learns_on(devices: &str) {
    let (few, epochs): (&[&str], usize) = if long() { (&[], 60) } else { (&SHORT, 6) };
    let output = match devices {
        "4" if !long() => short_on_four().to_owned(),
        _ => succeeds(&[&["--devices", devices, "--check"], few].concat()),
    };
    let accuracy: f64 = value(&output, "held-out accuracy ").parse().unwrap();
    assert!(accuracy >= 0.97, "{output}");
    assert!(output.contains(&format!("weights are bitwise equal on {devices} device")), "{output}");
    assert!(output.contains("the same run gave the same bits again"), "{output}");
    // The table has a line per device, and their rows are all rows of all epochs.
    let rows = |line: &str| line.split(['│', '┆']).nth(3).and_then(|cell| cell.trim().parse::<usize>().ok());
    let rows: Vec<usize> = output.lines().filter_map(rows).collect();
    assert_eq!(rows.len().to_string(), devices, "{output}");
    assert_eq!(rows.iter().sum::<usize>(), epochs * 1437, "{output}");
}

#[test]
fn learns_on_one_device() {
    learns_on("1");
}

#[test]
fn learns_on_two_devices() {
    learns_on("2");
}

#[test]
fn learns_on_four_devices() {
    learns_on("4");
}

#[test]
fn learns_on_eight_devices() {
    learns_on("8");
}

/// Processes as torchrun starts them: `more` are the variables of one rank.
fn torchrun(processes: usize, arguments: &[&str], more: impl Fn(usize) -> Vec<(&'static str, String)>) -> Vec<Output> {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port() - 1;
    let start = |rank: usize| {
        let mut process = command(arguments);
        process.env("TORCHELASTIC_RUN_ID", "test").env("MASTER_ADDR", "localhost").env("MASTER_PORT", port.to_string());
        for (name, value) in
            [("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", processes), ("LOCAL_WORLD_SIZE", processes)]
        {
            process.env(name, value.to_string());
        }
        process.envs(more(rank)).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let started: Vec<_> = (0..processes).map(start).collect();
    started.into_iter().map(|process| process.wait_with_output().unwrap()).collect()
}

#[test]
fn two_processes_train_one_model() {
    let ended = torchrun(2, &[&["--devices", "2", "--check"], &SHORT[..]].concat(), |_| Vec::new());
    for output in &ended {
        assert!(output.status.success(), "{}", text(&output.stderr));
    }
    // Only the first process prints.
    assert_eq!(text(&ended[1].stdout), "");
    let together = text(&ended[0].stdout);
    assert!(together.contains("weights are bitwise equal on 4 devices"), "{together}");
    assert!(together.contains("the same run gave the same bits again"), "{together}");
    assert_eq!(value(&together, "held-out accuracy "), value(short_on_four(), "held-out accuracy "));
}

#[test]
fn processes_that_do_not_fit_together() {
    // Half of a launcher's variables.
    let mut half = command(&["--devices", "2"]);
    let half = half.env("GPU_POOL_RANK", "0").output().unwrap();
    assert!(!half.status.success() && text(&half.stderr).contains("GPU_POOL_MASTER"), "{}", text(&half.stderr));
    // Each has rows enough for itself.
    for output in torchrun(2, &["--devices", "3", "--batch", "5"], |_| Vec::new()) {
        assert_eq!(output.status.code(), Some(1));
        assert!(text(&output.stderr).contains("6 devices are more than the 5 rows"), "{}", text(&output.stderr));
    }
    // Another transport on one side.
    let transport = |rank: usize| vec![("GPU_POOL_TRANSPORT", ["shm", "auto"][rank].to_owned())];
    assert!(torchrun(2, &["--epochs", "1"], transport).iter().all(|output| output.status.success()));
    let transport = |rank: usize| vec![("GPU_POOL_TRANSPORT", ["shm", "nccl"][rank].to_owned())];
    for output in torchrun(2, &["--epochs", "1"], transport) {
        assert_eq!(output.status.code(), Some(1));
        assert!(text(&output.stderr).contains("GPU_POOL_TRANSPORT"), "{}", text(&output.stderr));
    }
}

#[test]
fn the_same_command_gives_the_same_bits() {
    let hash = |arguments: &[&str]| value(&succeeds(arguments), "weights ").to_owned();
    let arguments = ["--devices", "3", "--epochs", "2"];
    assert_eq!(hash(&arguments), hash(&arguments));
    assert_ne!(hash(&arguments), hash(&["--devices", "3", "--epochs", "3"]), "the hash says nothing");
}

/// Five rows are left for the last batch of eight devices: three of them have none.
#[test]
fn fewer_rows_than_devices_in_the_last_batch() {
    let output = succeeds(&["--devices", "8", "--batch", "8", "--epochs", "1"]);
    assert!(value(&output, "held-out accuracy ").parse::<f64>().unwrap() > 0.9, "{output}");
    let whole = succeeds(&["--devices", "2", "--batch", "1000000", "--epochs", "1"]);
    assert!(whole.contains("held-out accuracy"), "{whole}");
}

/// One step on 1, 3 and 8 devices is the same step, up to rounding: the gradients are weighted by rows.
#[test]
fn the_number_of_devices_does_not_change_the_result() {
    let loss = |devices| value(&succeeds(&["--devices", devices, "--epochs", "2"]), "loss ").to_owned();
    let one = loss("1");
    assert_eq!([loss("3"), loss("8")], [one.clone(), one]);
}

#[test]
fn a_check_that_fails_fails() {
    fails(&["--devices", "2", "--epochs", "1", "--check"], &["accuracy", "below 0.97"]);
}

#[test]
fn settings_that_cannot_be() {
    fails(&["--devices", "0"], &["--devices 0", "at least one"]);
    fails(&["--devices", "-1"], &["--devices"]);
    fails(&["--devices", "four"], &["four"]);
    fails(&["--devices", "4", "--batch", "3"], &["4 devices are more than the 3 rows of a batch"]);
    fails(&["--devices", "2000", "--batch", "3000"], &["2000 devices are more than the 1437 training rows"]);
    fails(&["--devices", "65"], &["65", "1 to 64"]);
    fails(&["--epochs", "0"], &["--epochs 0"]);
    fails(&["--batch", "0"], &["--batch 0"]);
    fails(&["--lr", "0"], &["learning rate"]);
    fails(&["--lr", "nan"], &["learning rate"]);
    fails(&["--lr", "1e30", "--epochs", "3"], &["diverged", "--lr"]);
    fails(&["--backend", "tpu"], &["tpu"]);
    fails(&["--plot", "loss.jpg"], &["loss.jpg", ".svg or .png"]);
    let taken = folder("taken.png");
    fails(&["--plot", taken.to_str().unwrap()], &["taken.png", "there is a folder"]);
    fails(&["--plot", "no/such/folder/loss.svg"], &["no/such/folder"]);
}

#[test]
fn a_gpu_that_is_not_there() {
    fails(&["--backend", "cuda", "--devices", "100"], &["cannot open the devices", "no device"]);
}

/// A data file with these bytes.
fn data_file(name: &str, bytes: &[u8]) -> String {
    let path = folder("data").join(name);
    fs::write(&path, bytes).unwrap();
    path.to_str().unwrap().to_owned()
}

fn gzip(text: &str) -> Vec<u8> {
    let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
    gzip.write_all(text.as_bytes()).unwrap();
    gzip.finish().unwrap()
}

/// `count` images; the pixels are all `pixel`.
fn images(count: usize, pixel: &str) -> String {
    (0..count).map(|i| format!("{}{}\n", format!("{pixel},").repeat(64), i % 10)).collect()
}

#[test]
fn data_of_ones_own_plain_and_gzipped() {
    let csv = images(50, "3");
    for path in [data_file("own.csv", csv.as_bytes()), data_file("own.csv.gz", &gzip(&csv))] {
        let output = succeeds(&["--devices", "2", "--batch", "7", "--epochs", "2", "--data", &path]);
        assert!(output.contains("40 training rows, 10 held out"), "{output}");
    }
}

#[test]
fn data_that_is_not_usable() {
    let bad = |name: &str, bytes: &[u8], words: &[&str]| {
        let path = data_file(name, bytes);
        fails(&["--data", &path], &[&[name], words].concat());
    };
    fails(&["--data", "missing.csv.gz"], &["cannot read", "missing.csv.gz", "No such file"]);
    fails(&["--data", "."], &["cannot read"]);
    bad("empty.csv", b"", &["empty"]);
    bad("empty.csv.gz", &gzip(""), &["no images"]);
    bad("few.csv", images(3, "0").as_bytes(), &["3 images are too few"]);

    let shipped = fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/data/digits.csv.gz")).unwrap();
    bad("truncated.csv.gz", &shipped[..shipped.len() / 2], &["truncated", "after line"]);
    bad("no_trailer.csv.gz", &shipped[..shipped.len() - 3], &["truncated"]);
    let mut damaged = shipped.clone();
    damaged[30_000..30_016].fill(0x55);
    bad("damaged.csv.gz", &damaged, &["damaged.csv.gz", "line"]);
    bad("trailing.csv.gz", &[&shipped[..], b"and something else behind it"].concat(), &["damaged"]);
    bad("noise.csv", &[0xff, 0x00, 0x80, b'\n'], &["line 1", "65 columns"]);

    let good = images(10, "0");
    bad("columns.csv", format!("{good}1,2,3\n").as_bytes(), &["line 11", "65 columns, found 3"]);
    bad("pixel.csv", format!("{good}{}", images(1, "17")).as_bytes(), &["line 11, column 1", "0 to 16", "17"]);
    bad("negative.csv", images(10, "-1").as_bytes(), &["line 1, column 1", "-1"]);
    bad("word.csv", images(10, "dark").as_bytes(), &["line 1, column 1", "dark"]);
    bad("label.csv", good.replacen(",3\n", ",10\n", 1).as_bytes(), &["line 4, column 65", "0 to 9", "10"]);
    bad("header.csv", format!("{}label\n{good}", "p,".repeat(64)).as_bytes(), &["line 1, column 1"]);
}

fn zipped(text: &mut impl Read) -> Vec<u8> {
    let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
    std::io::copy(text, &mut gzip).unwrap();
    gzip.finish().unwrap()
}

/// A small file that unpacks to a large one costs neither memory nor time: the program has 512 MiB of addresses here.
/// 204 KB of commas took 6 GB.
#[test]
#[cfg(target_os = "linux")]
fn data_that_unpack_to_more_than_there_should_be() {
    let line = images(1, "0").into_bytes();
    let lines = |count: usize| Cursor::new(line.repeat(count));
    let bombs: [(&str, Vec<u8>, &str); 4] = [
        ("commas.csv.gz", zipped(&mut repeat(b',').take(40 << 20)), "after line 0: no image ends within"),
        ("quoted.csv.gz", zipped(&mut Cursor::new(b"\"").chain(repeat(b'\n').take(40 << 20))), "no image ends within"),
        ("lines.csv.gz", zipped(&mut lines(100_001)), "more than 100000 images"),
        (
            "good.csv.gz",
            zipped(&mut lines(9).chain(Cursor::new(b"\n")).chain(repeat(b',').take(1 << 20))),
            "after line 9",
        ),
    ];
    for (name, bytes, words) in bombs {
        let path = data_file(name, &bytes);
        let mut command = Command::new("sh");
        command.args(["-c", "ulimit -v 524288; exec \"$0\" --backend host --data \"$1\""]).arg(example()).arg(&path);
        let output = command.output().unwrap();
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{name}: {said}");
        assert!(said.contains(name) && said.contains(words) && !said.contains("panicked"), "{said}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(64)))]

    /// Bytes of any kind, and good files with a few wrong bytes, are read or refused.
    #[test]
    fn no_data_break_the_reader(noise: Vec<u8>, zip: bool, count in 0usize..12, changes: Vec<(usize, u8)>) {
        let whole = images(count, "7");
        for mut bytes in [noise, whole.clone().into_bytes(), whole.replace("7", "\"7\"").into_bytes()] {
            if zip {
                bytes = gzip(&String::from_utf8_lossy(&bytes));
            }
            let end = bytes.len().max(1);
            for &(at, byte) in changes.iter().take(4) {
                bytes.get_mut(at % end).into_iter().for_each(|place| *place = byte);
            }
            if let Ok(images) = data::read(&bytes) {
                prop_assert_eq!(images.pixels.len(), images.len() * data::PIXELS);
                prop_assert!(images.pixels.iter().all(|pixel| (0.0..=1.0).contains(pixel)));
                prop_assert!(images.labels.iter().all(|label| (0..data::CLASSES as i32).contains(label)));
            }
        }
    }

    /// What is written is read again.
    #[test]
    fn images_that_are_written_are_read(
        rows in proptest::collection::vec((proptest::collection::vec(0u8..=16, data::PIXELS), 0u8..10), 5..20)
    ) {
        let line = |(pixels, label): &(Vec<u8>, u8)| {
            pixels.iter().chain([label]).map(u8::to_string).collect::<Vec<_>>().join(",") + "\r\n"
        };
        let csv: String = rows.iter().map(line).collect();
        let plain = data::read(csv.as_bytes()).unwrap();
        prop_assert_eq!(&plain.labels, &rows.iter().map(|row| i32::from(row.1)).collect::<Vec<_>>());
        let pixels = rows.iter().flat_map(|row| &row.0).map(|pixel| f32::from(*pixel) / 16.0).collect::<Vec<_>>();
        prop_assert_eq!(&plain.pixels, &pixels);
        prop_assert_eq!(data::read(&gzip(&csv)).unwrap().pixels, pixels);
    }
}

#[test]
fn pictures() {
    let folder = folder("pictures");
    let draw = |name: &str| {
        let path = folder.join(name);
        let _ = fs::remove_file(&path);
        succeeds(&["--devices", "2", "--epochs", "3", "--plot", path.to_str().unwrap()]);
        fs::read(&path).unwrap()
    };
    let svg = text(&draw("loss.svg"));
    assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"), "{svg}");
    for words in ["step", "training loss", "held-out accuracy", "on 2 devices"] {
        assert!(svg.contains(words), "`{words}` is not in the picture");
    }
    let png = draw("loss.PNG");
    assert!(png.starts_with(b"\x89PNG\r\n\x1a\n") && png.len() > 10_000, "{} bytes", png.len());
}
