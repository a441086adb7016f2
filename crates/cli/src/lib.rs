// The subcommands and their dispatch. `bin/gpu-pool.rs` calls [`main`], and nothing else does. It may use the public
// interfaces of the crates below, `gpu_pool::extend::cli` and `gpu_pool_cluster::peer`. Each subcommand is one file.
#![doc = include_str!("../README.md")]
#![deny(clippy::disallowed_methods)]

mod bench;
mod doctor;
mod topo;
mod trace;

use clap::{Parser, Subcommand};
use gpu_pool::extend::cli;
use std::process::ExitCode;

/// Looks at a machine with several GPUs, and at programs that run there.
#[derive(Parser)]
#[command(name = "gpu-pool", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Doctor(doctor::Arguments),
    Topo(topo::Arguments),
    Bench(bench::Arguments),
    Trace(trace::Arguments),
}

/// The program: reads the arguments of the process, and returns its exit code. 0: all is well; 1: something is wrong;
/// 2: the arguments are not understood.
pub fn main() -> ExitCode {
    let arguments = Arguments::parse();
    // Else a pool refuses these variables.
    if ["GPU_POOL_CHECK", "GPU_POOL_FAULTS"].iter().any(|name| cli::variable(name).is_some()) {
        gpu_pool_lab::install();
    }
    let done = match arguments.command {
        Command::Doctor(arguments) => doctor::run(&arguments),
        Command::Topo(arguments) => topo::run(&arguments),
        Command::Bench(arguments) => bench::run(&arguments),
        Command::Trace(arguments) => trace::run(&arguments),
    };
    done.unwrap_or_else(|error| {
        eprintln!("gpu-pool: {error}");
        ExitCode::FAILURE
    })
}
