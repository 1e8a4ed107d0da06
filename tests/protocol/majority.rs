//! Jobs with several Lighthouses: only a majority continues.

use super::*;

/// "a" and "b" were connected with "c" and "d". A member that stays and knows that others left does not need them. If
/// no present member knows, a leaver counts as lost for the rest, who may know it.
#[test]
fn members_that_left_do_not_count_and_a_leaver_counts_only_with_more_than_half_of_the_rest() {
    let need = Need { is_majority: true, ..NEED };
    let minority = |found, size| Verdict::Wait(Wait::Minority { found, size });
    let last_group =
        |leaves, left| move |size, is_first| Some(LastGroup { leaves, left, ..seated(2, size, is_first) });
    let (stays, leaves, knows) = (last_group(false, 0), last_group(true, 0), last_group(false, 1));
    let judge = |set: &[(&str, Option<LastGroup>)]| {
        let told = |(id, last_group): &(&str, Option<LastGroup>)| {
            participant(id, Standing { last_group: last_group.clone(), ..standing(true, 2) })
        };
        judge(1, &set.iter().map(told).collect::<Vec<_>>(), need, None)
    };
    let continues = |set: &[(&str, Option<LastGroup>)]| matches!(judge(set), Verdict::New(_));
    // Of two members "a" leaves. Only "b" may know it; "a" cannot know whether "b" does.
    assert!(continues(&[("b", knows(2, false))]));
    assert_eq!(judge(&[("b", stays(2, false))]), minority(1, 2));
    assert_eq!(judge(&[("a", leaves(2, true))]), minority(0, 1));
    assert!(continues(&[("a", leaves(2, true)), ("b", stays(2, false))]), "it leaves after another vote");
    // Of four.
    assert_eq!(judge(&[("a", leaves(4, true)), ("b", stays(4, false))]), minority(1, 3));
    assert!(continues(&[("c", knows(4, false)), ("d", knows(4, false))]), "two of three");
    assert!(continues(&[("a", leaves(4, true)), ("b", stays(4, false)), ("c", stays(4, false))]));
    // Of three, and "c" is lost: had it continued without "a", it would be half of the rest without the lowest id.
    assert!(continues(&[("a", leaves(3, true)), ("b", stays(3, false))]));
    assert_eq!(judge(&[("c", knows(3, false))]), minority(1, 2));
}

/// In set 1 "a", "b" and "c" are connected, "d" joins, and all four begin that group: "a" and "d" learn that all have
/// connected, "b" and "c" do not. "a", "b" and "d" begin it again. After a partition only "a" and "d" may continue.
#[test]
fn a_group_that_was_begun_twice_counts_both_times() {
    let need = Need { is_majority: true, ..NEED };
    let members: Vec<String> = ["a", "b", "c", "d"].map(String::from).to_vec();
    let told = |id: &str, last_group: Option<(u64, usize, bool)>, groups: &[(u64, u64)]| {
        let last_group = last_group.map(|(at, size, is_first)| seated(at, size, is_first));
        let begun = Begun { members: members.clone(), groups: groups.to_vec() };
        let begun = if groups.is_empty() { vec![] } else { vec![begun] };
        participant(id, Standing { generation: 3, last_group, begun, ..standing(true, 4) })
    };
    let a = told("a", Some((2, 4, true)), &[(3, 3)]);
    let d = told("d", Some((2, 4, false)), &[(3, 3)]);
    let b = told("b", Some((1, 3, false)), &[(2, 2), (3, 3)]);
    let c = told("c", Some((1, 3, false)), &[(2, 2)]);
    let judge = |set: &[&Participant]| {
        judge(1, &set.iter().map(|&each| each.clone()).collect::<Vec<_>>(), need, None)
    };
    assert_eq!(judge(&[&b, &c]), Verdict::Wait(Wait::Minority { found: 2, size: 4 }));
    assert!(matches!(judge(&[&a, &d]), Verdict::New(_)));
    // A member that has begun a group counts for it, whatever it has begun since.
    assert!(matches!(judge(&[&d, &b, &c]), Verdict::New(_)));
    assert_eq!(judge(&[&d]), Verdict::Wait(Wait::Minority { found: 1, size: 4 }));
}

/// "b" has continued without "a", and both are connected when a partition separates them again: "a" has no state of
/// "b"'s yet. The same holds for newcomers that have begun a group with a member of a job.
#[test]
fn only_those_with_the_newest_state_that_they_know_of_go_on() {
    let need = Need { is_majority: true, ..NEED };
    let told = |id: &str, state, known, last_group| {
        participant(id, Standing { state, known, last_group, ..standing(true, 2) })
    };
    let a = told("a", 1, 2, Some(seated(3, 2, true)));
    let b = told("b", 2, 2, Some(seated(3, 2, false)));
    let judge_all = |set: &[&Participant]| {
        judge(1, &set.iter().map(|&each| each.clone()).collect::<Vec<_>>(), need, None)
    };
    let minority = Verdict::Wait(Wait::Minority { found: 1, size: 2 });
    assert_eq!(judge_all(&[&a]), minority, "it would take b's steps again");
    assert_eq!(judge_all(&[&b]), minority, "a may be the first of a later group");
    assert!(matches!(judge_all(&[&a, &b]), Verdict::New(_)));
    let apart = [Participant { unreachable: vec!["b".into()], ..a.clone() }, b.clone()];
    assert_eq!(
        judge(1, &apart, need, None),
        Verdict::Cut(["b".to_owned()].into()),
        "nobody withdraws for an older state"
    );

    let members = ["a", "y", "z"].map(String::from).to_vec();
    let begun = vec![Begun { members, groups: vec![(2, 2)] }];
    let new = |id: &str| participant(id, Standing { known: 1, begun: begun.clone(), ..standing(false, 0) });
    let trained = told("a", 1, 1, Some(seated(1, 2, true)));
    assert_eq!(judge_all(&[&new("y"), &new("z")]), Verdict::Wait(Wait::Minority { found: 2, size: 2 }));
    assert!(matches!(judge_all(&[&trained, &new("y"), &new("z")]), Verdict::New(_)));
}

/// "a" and "b" leave at the same vote, and "b" does not learn that its copies are settled.
#[test]
fn a_member_whose_others_left_with_it_waits_for_nobody() {
    for leaving in [1, 2] {
        let mut member = began_with("a", Settings { id: "b".into(), needs_majority: true, ..settings() });
        member.handle(Event::Gradients { is_whole: true, leaves: true, lag: 0 }).unwrap();
        member.handle(Event::Tally { votes: 2, newcomer_seen: 0, leaving, sums: vec![7] }).unwrap();
        member.handle(Event::Lost { reason: "it is gone".into() }).unwrap();
        let commands = member.handle(Event::Look { until: 9 }).unwrap();
        let Some(Command::Ask { standing, .. }) = commands.last() else { panic!("{commands:?}") };
        let participants = vec![participant("b", standing.clone())];
        let commands = member.handle(Event::Quorum { id: 2, participants, is_promoted: false }).unwrap();
        let waits = Command::Wait(Wait::Minority { found: 0, size: 1 });
        assert_eq!(commands, [if leaving == 2 { Command::Leave } else { waits }]);
    }
}

/// Only "d" has begun a group with "b" and "c", while these were connected with "a"; then they left on notice.
#[test]
fn a_group_of_the_generation_of_a_connected_one_was_never_connected() {
    let need = Need { is_majority: true, ..NEED };
    let last_group = Some(LastGroup { left: 2, ..seated(2, 3, true) });
    let a = participant("a", Standing { generation: 2, last_group, ..standing(true, 3) });
    let members = ["b", "c", "d"].map(String::from).to_vec();
    let begun = vec![Begun { members, groups: vec![(9, 2)] }];
    let last_group = Some(seated(1, 4, false));
    let d = participant("d", Standing { generation: 2, last_group, begun, ..standing(true, 4) });
    assert!(matches!(judge(1, &[a, d], need, None), Verdict::New(_)));
}
