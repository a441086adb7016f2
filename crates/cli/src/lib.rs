#![doc = include_str!("../README.md")]
#![deny(clippy::disallowed_methods)]

mod doctor;

use clap::{Parser, Subcommand};
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
}

/// The program: reads the arguments of the process, and returns its exit code. 0: all is well; 1: something is wrong;
/// 2: the arguments are not understood.
pub fn main() -> ExitCode {
    let done = match Arguments::parse().command {
        Command::Doctor(arguments) => doctor::run(&arguments),
    };
    done.unwrap_or_else(|error| {
        eprintln!("gpu-pool: {error}");
        ExitCode::FAILURE
    })
}
