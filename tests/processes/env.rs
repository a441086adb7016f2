//! The environment's settings. Each test runs this binary again with the variables set, so that tests do not race for
//! the process's own. ggml's GGML_CUDA_P2P=0 switches peer access on: values are parsed here, and bad ones are errors.

use crate::support::{again, task};
use gpu_pool::{Error, GpuPool, host::ExecutionOrder, memory::BackingChoice};
use gpu_pool_lab::Explorer;
use std::{fmt::Debug, process::Output, time::Duration};
use tracing::{Level, Metadata, field, span};

const VARIABLES: [&str; 9] = [
    "GPU_POOL_BACKEND",
    "GPU_POOL_DEVICES",
    "GPU_POOL_SHARE",
    "GPU_POOL_TIMEOUT",
    "GPU_POOL_CHECK",
    "GPU_POOL_SEED",
    "GPU_POOL_FAULTS",
    "GPU_POOL_MEMORY",
    "GPU_POOL_LOG",
];

/// What the pool of a process with these variables is like.
fn with(task: &str, variables: &[(&str, &str)]) -> String {
    let output = process(task, variables);
    let text = String::from_utf8_lossy(&output.stdout);
    let said = text.lines().find_map(|line| line.split_once("CHILD ")).map(|(_, said)| said.to_owned());
    said.unwrap_or_else(|| panic!("{output:?}"))
}

fn process(task: &str, variables: &[(&str, &str)]) -> Output {
    process_of("env::child", task, variables)
}

/// A process that runs one test, with these variables and no others of the crate.
pub fn process_of(test: &str, task: &str, variables: &[(&str, &str)]) -> Output {
    let mut command = again(&[test], task);
    for name in VARIABLES {
        command.env_remove(name);
    }
    command.envs(variables.iter().copied()).output().unwrap()
}

/// The subprocess.
#[test]
fn child() {
    let Some(task) = task() else { return };
    if task != "no laboratory" {
        gpu_pool_lab::install();
    }
    if task == "explore" {
        let explored = Explorer::new().devices(1).seeds(2).run(|pool| pool.run(|_, _| Ok(())).map(drop));
        return println!(
            "CHILD {}",
            explored.map_or_else(|failure| failure.to_string(), |e| format!("{} runs", e.runs))
        );
    }
    if task == "warnings" {
        return print_warnings(build_twice);
    }
    if task == "no subscriber" {
        return build_twice();
    }
    if task == "panics" {
        explore_panics();
        return println!("CHILD done");
    }
    let builder = match task.as_str() {
        "threaded" => GpuPool::builder().schedule(ExecutionOrder::Threaded),
        "auto memory" => GpuPool::builder().memory_backing(BackingChoice::Auto),
        "explicit" => GpuPool::builder().host(2).devices(&[1]).timeout(Duration::from_secs(9)),
        _ => GpuPool::builder(),
    };
    if task == "global" {
        let ordinals = GpuPool::scope(|dev, _| Ok(dev.info().ordinal));
        return println!("CHILD {:?}", ordinals.unwrap());
    }
    let pool = match builder.build() {
        Ok(pool) => pool,
        Err(error @ Error::InvalidArgument { .. }) => return println!("CHILD InvalidArgument {error}"),
        Err(error @ Error::NoDevice { .. }) => return println!("CHILD NoDevice {error}"),
        Err(error) => return println!("CHILD other {error}"),
    };
    if task == "timeout" {
        let error = pool.run(|dev, _| {
            if dev.rank() == 0 {
                return dev.barrier();
            }
            while dev.check().is_ok() {
                std::thread::sleep(Duration::from_millis(5));
            }
            Ok(())
        });
        return println!("CHILD {}", matches!(error, Err(Error::Timeout { waited, .. }) if waited.as_secs() < 10));
    }
    if task == "race" {
        let error = pool.run(|dev, _| {
            let mut x = dev.zeros::<f32>(100)?;
            let side = dev.stream()?;
            // SAFETY: what this promises is not so, which is what the checker is for.
            let raw = unsafe { dev.unordered() };
            raw.on(&side).scale(&mut x, 2.0)
        });
        return println!("CHILD {}", matches!(error, Err(Error::Misuse { .. })));
    }
    if task == "lost" {
        let error = pool.run(|dev, _| {
            let mut x = dev.zeros::<f32>(100)?;
            (0..4).try_for_each(|_| dev.scale(&mut x, 2.0))
        });
        return println!("CHILD {}", matches!(error, Err(Error::DeviceLost { device: 1, .. })));
    }
    if task == "trace" || task == "threaded" {
        return println!("CHILD {}", pool.trace().is_some());
    }
    if task == "upload" {
        return println!(
            "CHILD {}",
            matches!(pool.run(|dev, _| dev.upload(&[1.0f32])), Err(Error::OutOfMemory { .. }))
        );
    }
    println!("CHILD {:?}", pool.run(|dev, _| Ok(dev.info().ordinal)).unwrap());
}

fn build_twice() {
    (0..2).for_each(|_| drop(GpuPool::builder().host(1).build().unwrap()));
}

/// Prints what the crate warns of on this thread, one line for each event.
pub fn print_warnings<R>(f: impl FnOnce() -> R) -> R {
    struct Printer;
    impl tracing::Subscriber for Printer {
        fn enabled(&self, metadata: &Metadata<'_>) -> bool {
            *metadata.level() == Level::WARN
        }
        fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
            span::Id::from_u64(1)
        }
        fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
        fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
        fn event(&self, event: &tracing::Event<'_>) {
            let mut line = "WARNING".to_owned();
            event.record(&mut |field: &field::Field, value: &dyn Debug| line += &format!(" {field}={value:?}"));
            println!("{line}");
        }
        fn enter(&self, _: &span::Id) {}
        fn exit(&self, _: &span::Id) {}
    }
    tracing::subscriber::with_default(Printer, f)
}

/// Once, and with the name that was meant.
#[test]
fn a_misspelt_variable_is_warned_of() {
    let warnings = |variables: &[(&str, &str)]| {
        let output = process("warnings", variables);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.lines().filter_map(|line| line.split_once("WARNING ")).map(|(_, said)| said.to_owned()).collect::<Vec<_>>()
    };
    let said = warnings(&[("GPU_POOL_TIMOUT", "30s")]);
    assert_eq!(said.len(), 1, "{said:?}");
    assert!(said[0].contains("GPU_POOL_TIMOUT") && said[0].contains("GPU_POOL_TIMEOUT"), "{said:?}");
    assert_eq!(warnings(&[("GPU_POOL_TIMEOUT", "30s")]), Vec::<String>::new());
}

/// Also a program without a `tracing` subscriber learns of it, on stderr.
#[test]
fn a_misspelt_variable_is_warned_of_without_a_subscriber() {
    let misspelt = ("GPU_POOL_TIMOUT", "30s");
    let said = |log: &[(&str, &str)], task| {
        let output = process(task, &[&[misspelt], log].concat());
        assert!(output.status.success(), "{output:?}");
        lines_of_the_log(&output)
    };
    let meant = "gpu-pool: warn: GPU_POOL_TIMOUT has no effect: gpu-pool does not know it; GPU_POOL_TIMEOUT is meant?";
    for log in [&[][..], &[("GPU_POOL_LOG", "warn")], &[("GPU_POOL_LOG", "info")], &[("GPU_POOL_LOG", "")]] {
        assert_eq!(said(log, "no subscriber"), [meant], "{log:?}");
    }
    for log in ["off", "error"] {
        assert_eq!(said(&[("GPU_POOL_LOG", log)], "no subscriber"), Vec::<String>::new());
    }
    assert_eq!(said(&[], "warnings"), Vec::<String>::new(), "the subscriber has it");
}

#[test]
fn a_level_that_is_not_understood_is_refused() {
    let refused = with("", &[("GPU_POOL_BACKEND", "host:1"), ("GPU_POOL_LOG", "nonsense")]);
    assert!(refused.starts_with("InvalidArgument GPU_POOL_LOG"), "{refused}");
    assert!(refused.contains("`nonsense`") && refused.contains("off, error, warn, info or debug"), "{refused}");
}

/// What the crate has written to a process's stderr.
pub fn lines_of_the_log(output: &Output) -> Vec<String> {
    let text = String::from_utf8_lossy(&output.stderr);
    text.lines().filter(|line| line.starts_with("gpu-pool: ")).map(str::to_owned).collect()
}

/// What the program says comes first, also where it says what is the default.
#[test]
fn a_default_that_the_program_names_is_the_programs_word() {
    let host = ("GPU_POOL_BACKEND", "host:2");
    assert_eq!(with("threaded", &[host, ("GPU_POOL_SEED", "7")]), "false");
    assert_eq!(with("threaded", &[host, ("GPU_POOL_SEED", "nonsense")]), "false");
    assert_eq!(with("auto memory", &[host, ("GPU_POOL_MEMORY", "nonsense")]), "[0, 1]");
}

#[test]
fn the_checker() {
    let host = ("GPU_POOL_BACKEND", "host:1");
    assert_eq!(with("race", &[host, ("GPU_POOL_CHECK", "races")]), "true");
    assert_eq!(with("race", &[host, ("GPU_POOL_CHECK", "off")]), "false");
    assert_eq!(with("race", &[host]), "false");
}

#[test]
fn a_program_without_the_laboratory_refuses_its_variables() {
    let host = ("GPU_POOL_BACKEND", "host:1");
    for asked in [("GPU_POOL_CHECK", "races"), ("GPU_POOL_FAULTS", "0:launch:1:lost")] {
        let said = with("no laboratory", &[host, asked]);
        assert!(
            said.starts_with("InvalidArgument") && said.contains(asked.0) && said.contains("gpu-pool-lab"),
            "{said}"
        );
    }
    assert!(!with("no laboratory", &[host, ("GPU_POOL_CHECK", "off")]).starts_with("InvalidArgument"));
}

#[test]
fn the_seed() {
    let host = ("GPU_POOL_BACKEND", "host:2");
    assert_eq!(with("trace", &[host, ("GPU_POOL_SEED", "7")]), "true");
    assert_eq!(with("trace", &[host]), "false");
    assert_eq!(with("explore", &[("GPU_POOL_SEED", "7")]), "1 runs");
    assert_eq!(with("explore", &[]), "2 runs");
    let refused = with("explore", &[("GPU_POOL_SEED", "0x7")]);
    assert!(refused.contains("GPU_POOL_SEED") && refused.contains("0x7"), "{refused}");
}

#[test]
fn faults() {
    let host = ("GPU_POOL_BACKEND", "host:1");
    assert_eq!(with("upload", &[host, ("GPU_POOL_FAULTS", "0:host-alloc:1+:oom")]), "true");
    assert_eq!(with("upload", &[host]), "false");
    // The example of the book's environment.md: launches are counted from when the pool is built, whose probe launches,
    // too.
    let pair = ("GPU_POOL_BACKEND", "host:2");
    assert_eq!(with("lost", &[pair, ("GPU_POOL_FAULTS", "1:launch:3:lost")]), "true");
}

#[test]
fn the_number_of_software_gpus() {
    assert_eq!(with("build", &[("GPU_POOL_BACKEND", "host:3")]), "[0, 1, 2]");
    assert_eq!(with("build", &[("GPU_POOL_BACKEND", " host:1 ")]), "[0]");
    assert_eq!(with("build", &[("GPU_POOL_BACKEND", "host")]), "[0, 1, 2, 3]");
    assert_eq!(with("global", &[("GPU_POOL_BACKEND", "host:2")]), "[0, 1]");
}

#[test]
fn the_devices_and_their_order() {
    assert_eq!(with("build", &[("GPU_POOL_BACKEND", "host:4"), ("GPU_POOL_DEVICES", "2, 0")]), "[2, 0]");
    // An empty variable is none.
    assert_eq!(with("build", &[("GPU_POOL_BACKEND", "host:2"), ("GPU_POOL_DEVICES", "")]), "[0, 1]");
}

#[test]
fn software_gpus_are_not_shared() {
    let share = ("GPU_POOL_SHARE", "2");
    assert_eq!(with("build", &[("GPU_POOL_BACKEND", "host:2"), share]), "[0, 1]");
    let said = with("build", &[("GPU_POOL_BACKEND", "host:2"), ("GPU_POOL_DEVICES", "0,0"), share]);
    assert!(said.starts_with("InvalidArgument") && said.contains("listed twice"), "{said}");
}

#[test]
fn a_device_that_is_not_there_is_named() {
    let said = with("build", &[("GPU_POOL_BACKEND", "host:3"), ("GPU_POOL_DEVICES", "0,9")]);
    assert!(said.starts_with("NoDevice") && said.contains("device 9") && said.contains("3 software GPUs"), "{said}");
    let said = with("build", &[("GPU_POOL_BACKEND", "cuda"), ("GPU_POOL_DEVICES", "9999")]);
    assert!(said.starts_with("NoDevice"), "{said}");
}

#[test]
fn values_that_are_not_understood_are_errors_that_name_the_variable() {
    for (name, value) in [
        ("GPU_POOL_BACKEND", "gpu"),
        ("GPU_POOL_BACKEND", "host:many"),
        ("GPU_POOL_BACKEND", "host:"),
        ("GPU_POOL_BACKEND", "host:-1"),
        ("GPU_POOL_BACKEND", "1"),
        ("GPU_POOL_DEVICES", "0,x"),
        ("GPU_POOL_DEVICES", "0,,1"),
        ("GPU_POOL_DEVICES", "-1"),
        ("GPU_POOL_SHARE", "all"),
        ("GPU_POOL_SHARE", "0"),
        ("GPU_POOL_SHARE", "17"),
        ("GPU_POOL_TIMEOUT", "soon"),
        ("GPU_POOL_TIMEOUT", "-3s"),
        ("GPU_POOL_TIMEOUT", "0"),
        ("GPU_POOL_TIMEOUT", "1e-12s"),
        ("GPU_POOL_TIMEOUT", "10 parsecs"),
        ("GPU_POOL_CHECK", "yes"),
        ("GPU_POOL_SEED", "-1"),
        ("GPU_POOL_FAULTS", "everything"),
    ] {
        let backend = ("GPU_POOL_BACKEND", "host:2");
        let said =
            if name == backend.0 { with("build", &[(name, value)]) } else { with("build", &[backend, (name, value)]) };
        assert!(said.starts_with("InvalidArgument") && said.contains(name) && said.contains(value), "{value}: {said}");
    }
    for count in ["host:0", "host:65"] {
        let said = with("build", &[("GPU_POOL_BACKEND", count)]);
        assert!(said.starts_with("InvalidArgument") && said.contains("1 to 64"), "{said}");
    }
    let said = with("build", &[("GPU_POOL_BACKEND", "host:4"), ("GPU_POOL_DEVICES", "1,1")]);
    assert!(said.starts_with("InvalidArgument") && said.contains("twice"), "{said}");
}

#[test]
fn the_deadline() {
    assert_eq!(with("timeout", &[("GPU_POOL_BACKEND", "host:2"), ("GPU_POOL_TIMEOUT", "200ms")]), "true");
}

#[test]
fn what_the_program_says_comes_first() {
    let all = [("GPU_POOL_BACKEND", "nonsense"), ("GPU_POOL_DEVICES", "nonsense"), ("GPU_POOL_TIMEOUT", "nonsense")];
    assert_eq!(with("explicit", &all), "[1]");
}

/// Fails on the calling thread, and on a device thread.
fn explore_panics() {
    let explorer = Explorer::new().devices(2).seeds(1);
    let failure = explorer.run(|pool| {
        pool.run(|dev, _| dev.zeros::<u32>(4).map(drop))?;
        panic!("the caller panics")
    });
    let text = failure.unwrap_err().to_string();
    assert!(text.contains("switches between streams none is needed (after 2 more runs"), "{text}");
    assert!(text.contains("Exactly this run: Explorer::new().devices(2).replay([]).run(f)"), "{text}");
    let on_a_device = |pool: &GpuPool| {
        pool.run(|dev, _| {
            assert!(dev.rank() == 0, "a device panics");
            Ok(())
        })
        .map(drop)
    };
    let text = explorer.configure(|b| b.without_peer_access()).run(on_a_device).unwrap_err().to_string();
    assert!(text.contains("a device panics"), "{text}");
    // What was hushed is heard again, on a new pool's threads, too.
    let pool = GpuPool::builder().host(2).build().unwrap();
    assert!(pool.run(|_, _| -> gpu_pool::Result<()> { panic!("a device panics later") }).is_err());
    assert!(std::panic::catch_unwind(|| panic!("the caller panics later")).is_err());
    let configured = Explorer::new().devices(1).seeds(1).configure(|b| b.without_peer_access());
    let failure = configured.run(|pool| {
        pool.run(|dev, _| dev.zeros::<u32>(4).map(drop))?;
        Err(Error::custom("no"))
    });
    let text = failure.unwrap_err().to_string();
    assert!(text.contains("Explorer::new().devices(1).configure(/* as before */).replay([]).run(f)"), "{text}");
    assert!(Explorer::new().devices(1).replay([]).run(|_| Ok(())).is_ok());
}

#[test]
fn shrinking_prints_no_panic_again() {
    let output = process("panics", &[]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(String::from_utf8_lossy(&output.stdout).contains("CHILD done"), "{output:?}");
    let times = |text: &str| said.lines().filter(|line| line.trim_end() == text).count();
    assert_eq!((times("the caller panics"), times("a device panics")), (1, 1), "{said}");
    assert_eq!((times("the caller panics later"), times("a device panics later")), (1, 2), "{said}");
}

#[test]
fn an_exploration_has_the_devices_that_the_program_says() {
    assert_eq!(with("explore", &[("GPU_POOL_DEVICES", "3")]), "2 runs");
}
