//! The launcher of this process, its rank and the number of processes: from environment variables.

use crate::runtime::variables::NotText;
use gpu_pool::{Error, Result};

/// The port of rank 0 under SLURM is one of a thousand from here on, by the job's number.
const SLURM_PORT: u16 = 29_600;

/// The most processes of a cluster. Each costs rank 0 a connection and a thread.
const MOST: usize = 65_536;

pub(super) type Read<'a> = &'a dyn Fn(&str) -> Result<Option<String>, NotText>;

const OWN: [&str; 4] = ["GPU_POOL_RANK", "GPU_POOL_SIZE", "GPU_POOL_LOCAL_RANK", "GPU_POOL_LOCAL_SIZE"];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum By {
    /// `GPU_POOL_RANK` and `GPU_POOL_SIZE`, or [`Cluster::tcp`](super::Cluster::tcp).
    Hand,
    OpenMpi,
    Mpich,
    Torchrun,
    Slurm,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Launch {
    pub rank: usize,
    pub size: usize,
    /// Among the processes of this machine.
    pub local_rank: usize,
    pub local_size: usize,
    /// Where rank 0 listens. `None`: MPI tells it.
    pub master: Option<(String, u16)>,
    pub by: By,
}

pub(super) fn wrong(why: impl Into<String>) -> Error {
    Error::Cluster { op: "environment", why: why.into() }
}

pub(crate) fn no_launcher() -> Error {
    wrong(
        "no launcher has started this process: none of GPU_POOL_RANK, OMPI_COMM_WORLD_RANK, PMI_RANK, \
         TORCHELASTIC_RUN_ID and SLURM_PROCID is set: start it by mpirun, torchrun, srun, or use `Cluster::tcp`",
    )
}

/// Variables, by name. A blank one counts as unset.
pub(super) struct Variables<'a>(pub Read<'a>);

impl Variables<'_> {
    /// As it is set.
    pub(super) fn raw(&self, name: &str) -> Result<Option<String>> {
        self.0(name).map_err(|not| wrong(not.to_string()))
    }

    pub(super) fn text(&self, name: &str) -> Result<Option<String>> {
        Ok(self.raw(name)?.map(|text| text.trim().to_owned()).filter(|text| !text.is_empty()))
    }

    fn number<T: std::str::FromStr>(&self, name: &str) -> Result<Option<T>> {
        let parse = |text: String| text.parse().map_err(|_| wrong(format!("{name} is `{text}`, which is no number")));
        self.text(name)?.map(parse).transpose()
    }

    fn first(&self, names: [&str; 2]) -> Result<Option<String>> {
        let first = self.text(names[0])?;
        if first.is_some() { Ok(first) } else { self.text(names[1]) }
    }

    fn family<const N: usize>(&self, by: &str, names: [&str; N]) -> Result<Option<[usize; N]>> {
        let mut numbers = [0; N];
        let mut missing = Vec::new();
        for (name, number) in names.iter().zip(&mut numbers) {
            match self.number(name)? {
                Some(found) => *number = found,
                None => missing.push(*name),
            }
        }
        match missing.len() {
            0 => Ok(Some(numbers)),
            n if n == N => Ok(None),
            _ => Err(wrong(format!("{by} has started this process, it seems, but {} is not set", missing.join(", ")))),
        }
    }

    fn own_master(&self) -> Result<Option<(String, u16)>> {
        match (self.text("GPU_POOL_MASTER")?, self.number("GPU_POOL_PORT")?) {
            (Some(host), Some(port)) => Ok(Some((host.trim_matches(['[', ']']).to_owned(), port))),
            (None, None) => Ok(None),
            (None, Some(_)) => Err(wrong("GPU_POOL_PORT is set, but GPU_POOL_MASTER is not set")),
            (Some(_), None) => Err(wrong("GPU_POOL_MASTER is set, but GPU_POOL_PORT is not set")),
        }
    }

    fn hand(&self) -> Result<Option<Launch>> {
        let mut any = false;
        for name in OWN {
            any |= self.text(name)?.is_some();
        }
        if !any {
            // Bad ones are told also to a process that would run alone.
            self.text("GPU_POOL_MASTER")?;
            self.number::<u16>("GPU_POOL_PORT")?;
            return Ok(None);
        }
        let missing = |name: &str| wrong(format!("other variables GPU_POOL_* are set, but {name} is not set"));
        let need = |name: &'static str| self.number(name)?.ok_or_else(|| missing(name));
        let [local_rank, local_size] = self.family("this crate", [OWN[2], OWN[3]])?.unwrap_or([0, 1]);
        let master = Some(self.own_master()?.ok_or_else(|| missing("GPU_POOL_MASTER"))?);
        Ok(Some(Launch { rank: need(OWN[0])?, size: need(OWN[1])?, local_rank, local_size, master, by: By::Hand }))
    }

    fn open_mpi(&self) -> Result<Option<Launch>> {
        let names = [
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ];
        let Some([rank, size, local_rank, local_size]) = self.family("Open MPI", names)? else { return Ok(None) };
        Ok(Some(Launch { rank, size, local_rank, local_size, master: self.own_master()?, by: By::OpenMpi }))
    }

    fn mpich(&self) -> Result<Option<Launch>> {
        let Some([rank, size]) = self.family("MPICH", ["PMI_RANK", "PMI_SIZE"])? else { return Ok(None) };
        let local = match self.family("MPICH", ["MPI_LOCALRANKID", "MPI_LOCALNRANKS"])? {
            // Cray's PALS has names of its own.
            None => self.family("PALS", ["PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"])?,
            local => local,
        };
        // srun speaks PMI-2 to its tasks, without a rank among those of the machine.
        if local.is_none() && self.text("SLURM_PROCID")?.is_some() {
            return Ok(None);
        }
        let [local_rank, local_size] = local.unwrap_or([0, 1]);
        Ok(Some(Launch { rank, size, local_rank, local_size, master: self.own_master()?, by: By::Mpich }))
    }

    fn torchrun(&self) -> Result<Option<Launch>> {
        // People set some of these by hand for other programs: a process is torchrun's only if it says so, or if both
        // the address and the rank are there.
        let certain = self.text("TORCHELASTIC_RUN_ID")?.is_some();
        if !certain && (self.text("MASTER_ADDR")?.is_none() || self.text("RANK")?.is_none()) {
            return Ok(None);
        }
        let missing = |name: &str| wrong(format!("torchrun has started this process, it seems, but {name} is not set"));
        let need = |name: &'static str| self.number(name)?.ok_or_else(|| missing(name));
        let [local_rank, local_size] = self.family("torchrun", ["LOCAL_RANK", "LOCAL_WORLD_SIZE"])?.unwrap_or([0, 1]);
        let host = self.text("MASTER_ADDR")?.ok_or_else(|| missing("MASTER_ADDR"))?;
        let port: u16 = self.number("MASTER_PORT")?.ok_or_else(|| missing("MASTER_PORT"))?;
        // MASTER_PORT itself is torchrun's own store.
        let port =
            port.checked_add(1).ok_or_else(|| wrong("MASTER_PORT is 65535, and this needs the port above it"))?;
        let launch = Launch {
            rank: need("RANK")?,
            size: need("WORLD_SIZE")?,
            local_rank,
            local_size,
            master: Some((host, port)),
            by: By::Torchrun,
        };
        self.at_hand(launch).map(Some)
    }

    fn slurm(&self) -> Result<Option<Launch>> {
        let of_step = self.text("SLURM_STEP_NUM_TASKS")?.is_some();
        let tasks = if of_step { "SLURM_STEP_NUM_TASKS" } else { "SLURM_NTASKS" };
        // A shell of `salloc` has SLURM_NTASKS alone, and is no task.
        if self.text("SLURM_PROCID")?.is_none() {
            return Ok(None);
        }
        let names = ["SLURM_PROCID", tasks, "SLURM_LOCALID"];
        let Some([rank, size, local_rank]) = self.family("srun", names)? else { return Ok(None) };
        let node = self.number("SLURM_NODEID")?.unwrap_or(0);
        let tasks = self.first(["SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"])?;
        let local_size = match tasks {
            Some(text) => tasks_of(&text, node)
                .ok_or_else(|| wrong(format!("SLURM_STEP_TASKS_PER_NODE is `{text}`: nothing for node {node}")))?,
            None => 1,
        };
        let nodes = self.first(["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"])?;
        let host = match nodes.and_then(|list| first_node(&list)) {
            Some(host) => Some(host),
            None => self.text("SLURM_LAUNCH_NODE_IPADDR")?,
        };
        let host = host.ok_or_else(|| wrong("srun has started this process, but SLURM_STEP_NODELIST is not set"))?;
        let job: u64 = self.number("SLURM_JOB_ID")?.unwrap_or(0);
        let port = SLURM_PORT + (job % 1000) as u16;
        let launch = Launch { rank, size, local_rank, local_size, master: Some((host, port)), by: By::Slurm };
        self.at_hand(launch).map(Some)
    }

    /// With all processes on one machine no other machine need reach rank 0. This crate's own variables come first.
    fn at_hand(&self, mut launch: Launch) -> Result<Launch> {
        if let Some((_, port)) = &launch.master
            && launch.local_size == launch.size
        {
            launch.master = Some(("127.0.0.1".to_owned(), *port));
        }
        launch.master = self.own_master()?.or(launch.master);
        Ok(launch)
    }
}

impl Launch {
    /// The launcher of this process, by its environment; none if it was no launcher. Of several launchers the inner one
    /// counts: `mpirun` may run within `srun`, and other programs may set torchrun's names.
    pub(super) fn from(variables: &Variables<'_>) -> Result<Option<Launch>> {
        let all = [Variables::hand, Variables::open_mpi, Variables::mpich, Variables::torchrun, Variables::slurm];
        for launcher in all {
            if let Some(launch) = launcher(variables)? {
                return launch.checked().map(Some);
            }
        }
        Ok(None)
    }

    pub(crate) fn checked(self) -> Result<Launch> {
        let Launch { rank, size, local_rank, local_size, by, .. } = self;
        fail_if!(size > MOST, wrong(format!("{size} processes ({by:?}): a cluster has {MOST} at most")));
        if rank < size && local_rank < local_size && local_size <= size {
            return Ok(self);
        }
        Err(wrong(format!("rank {rank} of {size} processes, {local_rank} of {local_size} on this machine ({by:?})")))
    }
}

/// The first machine of a list like `node[003-007,12]-ib,b`.
fn first_node(list: &str) -> Option<String> {
    let end = list.find(['[', ',']).unwrap_or(list.len());
    let (head, rest) = list.split_at(end);
    let Some(rest) = rest.strip_prefix('[') else {
        return (!head.is_empty()).then(|| head.to_owned());
    };
    let (numbers, tail) = rest.split_once(']')?;
    let first = numbers.split(['-', ',']).next()?;
    let tail = tail.split([',', '[']).next()?;
    Some(format!("{head}{first}{tail}"))
}

/// How many tasks a machine has, by a text like `2(x3),1`.
fn tasks_of(text: &str, node: usize) -> Option<usize> {
    let mut before = 0usize;
    for part in text.split(',') {
        let (tasks, times) = match part.trim().split_once("(x") {
            Some((tasks, times)) => (tasks, times.strip_suffix(')')?.parse().ok()?),
            None => (part.trim(), 1usize),
        };
        before = before.checked_add(times)?;
        if node < before {
            return tasks.parse().ok();
        }
    }
    None
}

/// The way in which processes agree on collectives. All take the same one; each process can exclude some.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Meeting {
    /// In shared memory, if all are on one machine; else as the next one.
    Auto,
    /// By rank 0, and by words of each process to all others.
    Mesh,
    /// By rank 0.
    Hub,
}

pub(super) fn meeting(variables: Read<'_>) -> Result<Meeting> {
    match Variables(variables).text("GPU_POOL_MEETING")?.as_deref() {
        None | Some("auto") => Ok(Meeting::Auto),
        Some("mesh") => Ok(Meeting::Mesh),
        Some("hub") => Ok(Meeting::Hub),
        Some(text) => {
            Err(wrong(format!("GPU_POOL_MEETING is `{text}`, which is not understood; expected auto, mesh or hub")))
        }
    }
}

#[cfg(test)]
#[path = "../tests/unit/launch_tests.rs"]
mod tests;
