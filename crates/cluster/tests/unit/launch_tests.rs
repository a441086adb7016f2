//! Which launcher has started a process: the variables of each, half of them, and any mixture.

use super::*;
use crate::texts;
use proptest::prelude::*;
use std::collections::BTreeMap;

fn with(variables: &[(&str, &str)]) -> Result<Launch> {
    let value = |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned());
    Launch::from(&Variables(&|name| Ok(value(name))))?.ok_or_else(no_launcher)
}

const TORCH: [(&str, &str); 7] = [
    ("TORCHELASTIC_RUN_ID", "x"),
    ("RANK", "3"),
    ("WORLD_SIZE", "4"),
    ("LOCAL_RANK", "1"),
    ("LOCAL_WORLD_SIZE", "2"),
    ("MASTER_ADDR", "first"),
    ("MASTER_PORT", "29500"),
];
const OPEN_MPI: [(&str, &str); 4] = [
    ("OMPI_COMM_WORLD_RANK", "1"),
    ("OMPI_COMM_WORLD_SIZE", "2"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
];
const MPICH: [(&str, &str); 4] =
    [("PMI_RANK", "1"), ("PMI_SIZE", "2"), ("MPI_LOCALRANKID", "1"), ("MPI_LOCALNRANKS", "2")];
const SLURM: [(&str, &str); 7] = [
    ("SLURM_PROCID", "5"),
    ("SLURM_STEP_NUM_TASKS", "8"),
    ("SLURM_LOCALID", "1"),
    ("SLURM_STEP_TASKS_PER_NODE", "2(x4)"),
    ("SLURM_STEP_NODELIST", "gpu[003-006]"),
    ("SLURM_NODEID", "2"),
    ("SLURM_JOB_ID", "7001"),
];
const HAND: [(&str, &str); 4] =
    [("GPU_POOL_RANK", "0"), ("GPU_POOL_SIZE", "2"), ("GPU_POOL_MASTER", "a"), ("GPU_POOL_PORT", "1")];

fn at(host: &str, port: u16) -> Option<(String, u16)> {
    Some((host.to_owned(), port))
}

#[test]
fn each_launcher_is_known() {
    let torch = with(&TORCH).unwrap();
    let expected = Launch {
        rank: 3,
        size: 4,
        local_rank: 1,
        local_size: 2,
        // torchrun's own store has MASTER_PORT.
        master: at("first", 29501),
        by: By::Torchrun,
    };
    assert_eq!(torch, expected);
    let mpi = with(&OPEN_MPI).unwrap();
    let expected = Launch { rank: 1, size: 2, local_rank: 1, local_size: 2, master: None, by: By::OpenMpi };
    assert_eq!(mpi, expected);
    assert_eq!(with(&MPICH).unwrap(), Launch { by: By::Mpich, ..expected });
    let slurm = with(&SLURM).unwrap();
    let expected =
        Launch { rank: 5, size: 8, local_rank: 1, local_size: 2, master: at("gpu003", 29601), by: By::Slurm };
    assert_eq!(slurm, expected);
    let hand = with(&HAND).unwrap();
    assert_eq!(hand, Launch { rank: 0, size: 2, local_rank: 0, local_size: 1, master: at("a", 1), by: By::Hand });
}

/// What launchers set. Those of MPI are as `env` has shown them, of Open MPI 4.1.4 and 5.0.11, MPICH 5.0.2 and Intel
/// MPI 2021.18; the others are written from their documents.
#[test]
fn recorded_environments() {
    let mpi = |by| Launch { rank: 1, size: 2, local_rank: 1, local_size: 2, master: None, by };
    let srun = Launch { rank: 5, size: 8, local_rank: 1, local_size: 2, master: at("gpu003", 29601), by: By::Slurm };
    let slurm = |more: &[(&'static str, &'static str)]| [&SLURM[..], more].concat();
    let pod =
        Launch { rank: 1, size: 3, local_rank: 0, local_size: 1, master: at("job-master-0", 23457), by: By::Torchrun };
    let torch = Launch { rank: 3, size: 4, local_rank: 1, local_size: 2, master: at("first", 29501), by: By::Torchrun };
    type Case = (&'static str, Vec<(&'static str, &'static str)>, Launch);
    let cases: Vec<Case> = vec![
        (
            "Open MPI 4",
            [
                &OPEN_MPI[..],
                &[
                    ("OMPI_COMMAND", "train"),
                    ("OMPI_COMM_WORLD_NODE_RANK", "1"),
                    ("OMPI_FIRST_RANKS", "0"),
                    ("OMPI_MCA_ess", "^singleton"),
                    ("OMPI_MCA_ess_base_vpid", "1"),
                    ("OMPI_UNIVERSE_SIZE", "2"),
                    ("PMIX_NAMESPACE", "1987969025"),
                    ("PMIX_RANK", "1"),
                ],
            ]
            .concat(),
            mpi(By::OpenMpi),
        ),
        (
            "Open MPI 5",
            [
                &OPEN_MPI[..],
                &[
                    ("OMPI_COMM_WORLD_NODE_RANK", "1"),
                    ("PMIX_NAMESPACE", "prterun-vm-6799@1"),
                    ("PMIX_RANK", "1"),
                    ("PRTE_LAUNCHED", "1"),
                ],
            ]
            .concat(),
            mpi(By::OpenMpi),
        ),
        (
            "MPICH",
            [&MPICH[..], &[("HYDI_CONTROL_FD", "7"), ("PMI_FD", "11"), ("PMI_HOSTNAME", "vm")]].concat(),
            mpi(By::Mpich),
        ),
        (
            "Intel MPI",
            [
                &MPICH[..],
                &[
                    ("HYDRA_BSTRAP_LAUNCHER", "ssh"),
                    ("I_MPI_HYDRA_TOPOLIB", "ipl2"),
                    ("I_MPI_PIN_INFO", "1"),
                    ("PMI_FD", "11"),
                ],
            ]
            .concat(),
            mpi(By::Mpich),
        ),
        ("MPICH within srun", slurm(&MPICH), mpi(By::Mpich)),
        (
            "srun --mpi=pmi2",
            slurm(&[("PMI_RANK", "5"), ("PMI_SIZE", "8"), ("PMI_FD", "14"), ("PMI_JOBID", "7001.0")]),
            srun.clone(),
        ),
        (
            "srun --mpi=pmix",
            slurm(&[
                ("PMIX_RANK", "5"),
                ("PMIX_NAMESPACE", "slurm.pmix.7001.0"),
                ("SLURM_PMIXP_ABORT_AGENT_PORT", "41021"),
            ]),
            srun.clone(),
        ),
        ("srun --mpi=none", slurm(&[("SLURM_NTASKS", "8"), ("SLURM_NNODES", "4")]), srun),
        (
            "torchrun",
            [
                &TORCH[..],
                &[
                    ("GROUP_RANK", "1"),
                    ("ROLE_RANK", "3"),
                    ("ROLE_WORLD_SIZE", "4"),
                    ("TORCHELASTIC_MAX_RESTARTS", "0"),
                ],
            ]
            .concat(),
            torch,
        ),
        (
            "Kubernetes' PyTorchJob",
            vec![
                ("KUBERNETES_SERVICE_HOST", "10.96.0.1"),
                ("KUBERNETES_SERVICE_PORT", "443"),
                ("MASTER_ADDR", "job-master-0"),
                ("MASTER_PORT", "23456"),
                ("PYTHONUNBUFFERED", "1"),
                ("RANK", "1"),
                ("WORLD_SIZE", "3"),
            ],
            pod,
        ),
        (
            "PBS with Cray's PALS",
            vec![
                ("PALS_APID", "1e6a1a0b"),
                ("PALS_LOCAL_RANKID", "1"),
                ("PALS_NODEID", "3"),
                ("PALS_RANKID", "13"),
                ("PBS_JOBID", "1234.pbs"),
                ("PMI_LOCAL_RANK", "1"),
                ("PMI_LOCAL_SIZE", "4"),
                ("PMI_RANK", "13"),
                ("PMI_SIZE", "16"),
            ],
            Launch { rank: 13, size: 16, local_rank: 1, local_size: 4, master: None, by: By::Mpich },
        ),
    ];
    for (name, variables, expected) in cases {
        assert_eq!(with(&variables).unwrap(), expected, "{name}");
    }
}

#[test]
fn on_one_machine_rank_0_is_at_loopback() {
    let mut torch = TORCH;
    torch[4].1 = "4";
    assert_eq!(with(&torch).unwrap().master, at("127.0.0.1", 29501));
    let own = [&torch[..], &HAND[2..]].concat();
    assert_eq!(with(&own).unwrap().master, at("a", 1), "the user's word comes first");
}

#[test]
fn the_inner_launcher_counts() {
    assert_eq!(with(&[&SLURM[..], &OPEN_MPI].concat()).unwrap().by, By::OpenMpi);
    assert_eq!(with(&[&SLURM[..], &TORCH].concat()).unwrap().by, By::Torchrun);
    assert_eq!(with(&[&SLURM[..], &MPICH, &HAND].concat()).unwrap().by, By::Hand);
    let mpi = with(&[&OPEN_MPI[..], &HAND[2..]].concat()).unwrap();
    assert_eq!((mpi.by, mpi.master), (By::OpenMpi, at("a", 1)));
}

/// torch's rendezvous: "environment variable WORLD_SIZE expected, but not set" (test_c10d_common.py, `env://`).
#[test]
fn a_half_set_family_names_what_is_missing() {
    for family in [&TORCH[..], &OPEN_MPI, &MPICH, &HAND, &SLURM[..3]] {
        for left_out in 0..family.len() {
            let mut some = family.to_vec();
            let (name, _) = some.remove(left_out);
            // Not certainly of this launcher any more.
            if ["TORCHELASTIC_RUN_ID", "SLURM_PROCID"].contains(&name) {
                continue;
            }
            let error = with(&some).unwrap_err();
            let expected = if name == "SLURM_STEP_NUM_TASKS" { "SLURM_NTASKS" } else { name };
            assert!(error.to_string().contains(expected) && matches!(error, Error::Cluster { .. }), "{name}: {error}");
        }
    }
    let one = with(&[("GPU_POOL_LOCAL_RANK", "0")]).unwrap_err().to_string();
    assert!(one.contains("GPU_POOL_LOCAL_SIZE"), "{one}");
    let nodes = with(&SLURM[..4]).unwrap_err().to_string();
    assert!(nodes.contains("SLURM_STEP_NODELIST") || nodes.contains("NODE"), "{nodes}");
}

#[test]
fn values_that_cannot_be() {
    for (variables, says) in [
        (&[("PMI_RANK", "2"), ("PMI_SIZE", "2")][..], "rank 2 of 2"),
        (&[("PMI_RANK", "-1"), ("PMI_SIZE", "2")], "PMI_RANK is `-1`"),
        (&[("PMI_RANK", "0"), ("PMI_SIZE", "0")], "rank 0 of 0"),
        (&[("RANK", "0"), ("WORLD_SIZE", "2")], "no launcher"),
        (&[("SLURM_NTASKS", "2")], "no launcher"),
        (&[], "no launcher"),
        (&[HAND[0], HAND[1], HAND[2], ("GPU_POOL_PORT", "70000")], "GPU_POOL_PORT is `70000`"),
        (&[HAND[0], HAND[1], HAND[2], ("GPU_POOL_PORT", "")], "GPU_POOL_PORT is not set"),
    ] {
        let error = with(variables).unwrap_err().to_string();
        assert!(error.contains(says), "{variables:?}: {error}");
    }
    let full = [&TORCH[..6], &[("MASTER_PORT", "65535")]].concat();
    assert!(with(&full).unwrap_err().to_string().contains("65535"));
}

#[test]
fn lists_of_machines() {
    for (list, first) in [
        ("a", "a"),
        ("a,b", "a"),
        ("n[1-3]", "n1"),
        ("n[003,7],m", "n003"),
        ("n[1-2]-ib,x", "n1-ib"),
        ("a,n[1-2]", "a"),
    ] {
        assert_eq!(first_node(list).as_deref(), Some(first), "{list}");
    }
    assert_eq!((first_node(""), first_node("n[1")), (None, None));
    let tasks: Vec<_> = (0..5).map(|node| tasks_of("2(x3),1", node)).collect();
    assert_eq!(tasks, [Some(2), Some(2), Some(2), Some(1), None]);
    assert_eq!((tasks_of("", 0), tasks_of("2(x", 0), tasks_of("2(x99999999999999999999)", 0)), (None, None, None));
}

static VALUES: &[&str] = &["0", "1", "2", "16", "29500", "65535", "gpu[003-006,9]-ib,b", "2(x3),1", "localhost", ""];

proptest! {
    #![proptest_config(texts::cases(512))]

    /// Any environment is a launch whose numbers fit, or a typed error.
    #[test]
    fn any_environment_is_understood_or_refused(
        set in prop::collection::btree_map(0..OWN.len() + 26, texts::like(VALUES), 0..30)
    ) {
        let names: Vec<&str> =
            [&OWN[..], &HAND.map(|v| v.0), &TORCH.map(|v| v.0), &OPEN_MPI.map(|v| v.0), &MPICH.map(|v| v.0),
             &SLURM.map(|v| v.0)].concat();
        let variables: BTreeMap<&str, String> = set.into_iter().map(|(i, value)| (names[i], value)).collect();
        match Launch::from(&Variables(&|name| Ok(variables.get(name).cloned()))) {
            Ok(None) => {}
            Ok(Some(l)) => {
                prop_assert!(l.rank < l.size && l.local_rank < l.local_size && l.local_size <= l.size, "{l:?}");
            }
            Err(Error::Cluster { op: "environment", why }) => prop_assert!(!why.is_empty()),
            Err(other) => prop_assert!(false, "{other}"),
        }
    }
}

/// Once each value but `hub` counted as `auto`.
#[test]
fn a_way_to_meet_is_known_or_refused() {
    let by = |way: &str| meeting(&|_| Ok(Some(way.to_owned())));
    let (auto, mesh, hub) = (Meeting::Auto, Meeting::Mesh, Meeting::Hub);
    assert_eq!([" hub", "mesh", "auto", " "].map(|way| by(way).unwrap()), [hub, mesh, auto, auto]);
    assert_eq!(meeting(&|_| Ok(None)).unwrap(), auto);
    assert!(by("Hub").unwrap_err().to_string().contains("GPU_POOL_MEETING is `Hub`"));
    assert!(meeting(&|name| Err(NotText(name.to_owned()))).is_err());
}

/// Each variable that is no text, or no number, is an error that names it. No error has the secret.
#[test]
fn a_bad_value_never_counts_as_absent() {
    let read = |bad: &str, set: &[(&str, &str)]| {
        crate::Cluster::from_variables(&|name| {
            if name == bad {
                return Err(NotText(name.to_owned()));
            }
            Ok(set.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned()))
        })
    };
    let text = |found: Result<Option<_>>| match found {
        Err(Error::Cluster { op: "environment", why }) => why,
        other => panic!("{other:?}"),
    };
    let own = [&OWN[..], &["GPU_POOL_MASTER", "GPU_POOL_PORT", "GPU_POOL_SECRET", "GPU_POOL_SILENCE"]].concat();
    for bad in own.iter().chain(&["GPU_POOL_TRANSPORT"]) {
        assert_eq!(text(read(bad, &HAND)), format!("the value of {bad} is not UTF-8"));
    }
    // Also where no launcher has started the process.
    for bad in own.iter().filter(|name| !name.ends_with("SECRET") && !name.ends_with("SILENCE")) {
        assert!(text(read(bad, &[])).contains(bad));
    }
    for family in [&TORCH[..], &OPEN_MPI, &MPICH, &SLURM[..5]] {
        for (bad, _) in family {
            assert!(text(read(bad, family)).contains(bad), "{bad}");
        }
    }
    let blank = [&HAND[..], &[("GPU_POOL_SECRET", " \t ")]].concat();
    assert!(text(read("", &blank)).contains("GPU_POOL_SECRET is blank"));
    let told = [&HAND[..], &[("GPU_POOL_SECRET", "xyzzy"), ("GPU_POOL_SILENCE", "soon")]].concat();
    assert!(!text(read("", &told)).contains("xyzzy"));
    assert!(read("", &HAND).unwrap().is_some() && read("", &[]).unwrap().is_none());
}

/// Once 4,000,000,000 processes were tables of 448 GB.
#[test]
fn a_cluster_has_65536_processes_at_most() {
    let sized = |size: &str| {
        let mut variables = HAND;
        variables[1].1 = size;
        with(&variables)
    };
    assert_eq!(sized("65536").unwrap().size, 65_536);
    for size in ["65537", "4000000000", "18446744073709551615"] {
        let error = sized(size).unwrap_err().to_string();
        assert!(error.contains(size) && error.contains("65536 at most"), "{error}");
    }
    let error = crate::Cluster::tcp("127.0.0.1:1", 0, 65_537, "").unwrap_err();
    assert!(matches!(error, Error::Cluster { .. }), "{error}");
}
