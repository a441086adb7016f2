use super::*;

#[test]
fn processes_of_one_machine_with_one_gpu_each_fit() {
    assert_eq!(fits(&[1; 2], true), Ok(()));
    assert_eq!(fits(&[1; 16], true), Ok(()));
    assert_eq!(fits(&[1; 17], true), Err("there are more than 16 processes".to_owned()));
    assert_eq!(fits(&[1, 2], true), Err("a process has several devices".to_owned()));
    assert_eq!(fits(&[1, 1], false), Err("the processes are on several machines".to_owned()));
}

#[test]
fn all_processes_need_a_pad_and_a_gpu_of_their_own() {
    let own = |process: u8, multiprocessors| word(&Ok(()), [process; 16], multiprocessors);
    assert_eq!(agreed(&[own(1, 132), own(2, 78), own(3, 132)]), Ok(78));
    let without = word::<()>(&Err("the GPU has no virtual memory management".to_owned()), [2; 16], 132);
    let why = "process 1: the GPU has no virtual memory management".to_owned();
    assert_eq!(agreed(&[own(1, 132), without]), Err(why));
    assert_eq!(agreed(&[own(1, 132), own(2, 132), own(1, 132)]), Err("processes 0 and 2 have one GPU".to_owned()));
}

/// Of several reasons all processes give the same one.
#[test]
fn the_first_reason_counts() {
    assert_eq!(first(&[vec![], vec![]]), Ok(()));
    let told = [vec![], b"no access".to_vec(), b"another reason".to_vec()];
    assert_eq!(first(&told), Err("process 1: no access".to_owned()));
}
