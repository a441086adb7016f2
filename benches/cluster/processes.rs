//! The processes of a cluster: this program again.

use std::{cell::RefCell, env, net::TcpListener, process::Command};

use crate::support::child::Process;

/// Tells a process what it is: `<gpu, host or mpi> <devices> <largest size>`.
pub const TASK: &str = "GPU_POOL_TEST_TASK";

/// Two processes of one cluster. They do not outlive it.
pub struct Processes {
    /// Takes the orders.
    pub first: RefCell<Process>,
    pub second: Process,
}

impl Processes {
    /// Started as by hand, with the variables of `GPU_POOL_*`. `set` changes the process of a rank.
    pub fn by_hand(task: &str, transport: &str, set: impl Fn(usize, &mut Command)) -> Processes {
        // The system's choice; another program could take it before the first process does, which nobody has seen yet.
        let port = TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).expect("a port").port();
        let [first, second] = [0, 1].map(|rank: usize| {
            let mut process = again(task);
            process.env("GPU_POOL_RANK", rank.to_string()).env("GPU_POOL_SIZE", "2");
            process.env("GPU_POOL_LOCAL_RANK", rank.to_string()).env("GPU_POOL_LOCAL_SIZE", "2");
            process.env("GPU_POOL_MASTER", "127.0.0.1").env("GPU_POOL_PORT", port.to_string());
            process.env("GPU_POOL_TRANSPORT", transport);
            set(rank, &mut process);
            Process::start(&mut process)
        });
        Processes { first: RefCell::new(first), second }
    }
}

/// This program, as a process with this task.
pub fn again(task: &str) -> Command {
    let mut process = Command::new(env::current_exe().expect("this program"));
    process.env(TASK, task);
    process
}
