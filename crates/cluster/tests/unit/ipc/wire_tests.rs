use super::*;

#[test]
fn a_process_is_told_by_its_start() {
    let own = Process::own().unwrap();
    assert!(own.is_alive() && !Process { start: own.start + 1, ..own }.is_alive());
    assert!(Process::of(u32::MAX).unwrap().is_none());
}

#[test]
fn names_of_programs_do_not_confuse() {
    let stat = "7 (a) Z (b) S 1 7 7 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 4242 9 9";
    assert_eq!(start(stat), Some(4242));
    assert_eq!(start(&stat.replace(") S", ") Z")), None, "it has ended, although nobody has waited for it");
    assert!(["", "7", "7 (a", "7 (a) S", "7 (a) S 1 2 3"].iter().all(|stat| start(stat).is_none()));
}

#[test]
fn keys_are_equal_in_each_bit() {
    let key = random("test").unwrap();
    assert!(same(&key, &key) && key != random("test").unwrap());
    for bit in 0..256 {
        let mut other = key;
        other[bit / 8] ^= 1 << (bit % 8);
        assert!(!same(&key, &other));
    }
}

#[test]
fn only_the_own_user_may_have_memory() {
    assert!(may_have(1000, 1000) && may_have(0, 0));
    assert!(!may_have(1000, 1001) && !may_have(0, 1000) && !may_have(1000, 0));
}

#[test]
fn elements_differ_by_name_and_size() {
    let all = [element::<f32>(), element::<u32>(), element::<f64>(), element::<[f32; 2]>(), element::<[f32; 3]>()];
    assert!(all.iter().enumerate().all(|(i, a)| !all[..i].contains(a)));
}
