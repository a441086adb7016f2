use super::*;

#[test]
fn a_seed_gives_its_draws_and_both_moods() {
    let draws = |seed| {
        let mut draw = Draw::new(seed);
        (0..4000).map(|_| draw.below(3)).collect::<Vec<_>>()
    };
    assert_eq!(draws(7), draws(7));
    assert_ne!(draws(7), draws(8));
    let all = draws(1);
    let stretch = |wanted: bool| all.split(|&c| (c == 0) != wanted).map(<[usize]>::len).max().unwrap();
    assert!(stretch(true) >= 20, "no long run of one stream");
    assert!(stretch(false) >= 5, "no wild switching");
    assert!((1..3).all(|c| all.contains(&c)));
}
