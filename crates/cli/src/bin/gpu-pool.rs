//! The program `gpu-pool`.

fn main() -> std::process::ExitCode {
    gpu_pool_cli::main()
}
