//! A side of a comparison that is a process of its own. It waits for a line `what rounds` and answers with
//! microseconds.

use std::{
    cell::RefCell,
    io::{BufRead, BufReader, Write},
    path::Path,
    process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio},
    sync::OnceLock,
};

use super::Side;

/// A child process that takes orders.
pub struct Process {
    child: Child,
    /// None once it shall end.
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Process {
    /// Starts it.
    pub fn start(command: &mut Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("the program runs");
        let orders = child.stdin.take();
        let answers = BufReader::new(child.stdout.take().expect("piped"));
        Process { child, orders, answers }
    }

    /// Starts `benches/peers/<script>` with these arguments and environment variables. None without a Python that has
    /// torch and `devices` GPUs.
    pub fn torch(script: &str, devices: usize, arguments: &[&str], variables: &[(&str, &str)]) -> Option<Self> {
        if !Process::has_torch(devices) {
            return None;
        }
        let built = format!("{}/benches/peers/{script}", env!("CARGO_MANIFEST_DIR"));
        // A packed bench runs in a copy of the repository.
        let script = if Path::new(&built).exists() { built } else { format!("benches/peers/{script}") };
        let variables = variables.iter().copied();
        Some(Process::start(Command::new("python3").arg(script).args(arguments).envs(variables)))
    }

    /// Whether python3 has torch, and that sees so many GPUs.
    pub fn has_torch(devices: usize) -> bool {
        torch_gpus() >= devices
    }

    /// Sends an order; [`answer`](Self::answer) waits for its time.
    pub fn order(&mut self, what: &str, rounds: usize) {
        let orders = self.orders.as_mut().expect("it was not closed");
        writeln!(orders, "{what} {rounds}").expect("the child lives");
    }

    /// Microseconds per round.
    pub fn answer(&mut self) -> f64 {
        self.try_answer().expect("a number of microseconds; a child's panic is printed above")
    }

    /// None if the child has ended, or answers something else.
    pub fn try_answer(&mut self) -> Option<f64> {
        let mut line = String::new();
        self.answers.read_line(&mut line).ok()?;
        line.trim().parse().ok()
    }

    /// Sends no more orders, so that it ends, and waits until it has.
    pub fn close(&mut self) -> ExitStatus {
        self.orders = None;
        self.ends()
    }

    /// Waits until it has ended by itself.
    pub fn ends(&mut self) -> ExitStatus {
        self.child.wait().expect("a child")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A Python process that times PyTorch.
pub struct Torch(RefCell<Process>);

impl Torch {
    /// Starts `benches/peers/<script>` on the first `devices` GPUs. None, and a message, where torch has not so many.
    pub fn start(script: &str, devices: usize) -> Option<Self> {
        let process = Process::torch(script, devices, &[&devices.to_string()], &[]);
        if process.is_none() {
            println!("no torch with {devices} GPUs: {script} is not among the peers");
        }
        process.map(|process| Torch(RefCell::new(process)))
    }

    /// Sends an order, and returns the answer.
    pub fn ask(&self, order: &str, number: usize) -> f64 {
        let mut process = self.0.borrow_mut();
        process.order(order, number);
        process.answer()
    }

    /// A side that gets the same order at every turn.
    pub fn side<'a>(&'a self, name: &'a str, order: String, number: usize) -> Side<'a> {
        Side::new(name, move || self.ask(&order, number))
    }
}

/// How many GPUs python3's torch sees; 0 without torch. The import takes seconds, so it is done once.
pub fn torch_gpus() -> usize {
    static COUNT: OnceLock<usize> = OnceLock::new();
    *COUNT.get_or_init(|| {
        let look = "import torch, torch.distributed; print(torch.cuda.device_count())";
        let looked = Command::new("python3").args(["-c", look]).stderr(Stdio::null()).output();
        looked.ok().and_then(|found| String::from_utf8(found.stdout).ok()?.trim().parse().ok()).unwrap_or(0)
    })
}

/// The child's side: answers orders until there are no more.
pub fn serve(mut time: impl FnMut(&str, usize) -> f64) {
    for line in std::io::stdin().lines() {
        let line = line.expect("the parent lives");
        let (what, rounds) = line.split_once(' ').expect("`what rounds`");
        println!("{}", time(what, rounds.parse().expect("a number")));
    }
}
