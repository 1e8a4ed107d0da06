//! Agreement: the members that continue together, and those that wait.

use super::*;

#[test]
fn a_member_that_was_left_behind_goes_on_if_its_operator_says_so() {
    let alone = [participant("a", Standing { adopted: 3, named: vec![], ..standing(true, 2) })];
    assert_eq!(judge(5, &alone, NEED, None), Verdict::LeftBehind { adopted: 3 });
    let need = Need { allows_solo_resume: true, ..NEED };
    assert!(matches!(judge(5, &alone, need, None), Verdict::New(agreement) if agreement.generation == 2));
}

#[test]
fn nobody_withdraws_in_favour_of_a_member_that_died_while_it_asked_beside_training() {
    let trained = Participant {
        waits: false,
        ..participant("a", Standing { epoch: Some(7), named: vec![(1, 1)], ..standing(true, 2) })
    };
    let lost = Participant {
        unreachable: vec!["a".into()],
        ..participant("b", Standing { named: vec![(1, 1)], ..standing(true, 2) })
    };
    let table = [trained.clone(), lost.clone()];
    assert_eq!(judge(2, &table, NEED, None), Verdict::Wait(Wait::Unheard));
    // "a" trains in a later group, which "b" cannot reach.
    let later = Participant { standing: Standing { generation: 2, ..trained.standing.clone() }, ..trained };
    assert_eq!(judge(2, &[later, lost], NEED, None), Verdict::Cut(["a".to_string()].into()));
}

#[test]
fn all_members_decide_alike_whether_to_wait_for_the_absent() {
    let member = |established, size, is_patient| Participant {
        is_patient,
        ..participant(if established { "a" } else { "z" }, standing(established, size))
    };
    let waits = |members: &[Participant]| {
        judge(2, members, Need { members: 1, ..NEED }, None) == Verdict::Wait(Wait::Absent)
    };
    assert!(waits(&[member(true, 3, true), member(true, 3, true)]));
    assert!(!waits(&[member(true, 3, true), member(true, 3, false)]), "one knows that the third is dead");
    assert!(!waits(&[member(true, 2, true), member(true, 2, true)]), "nobody is absent");
    assert!(
        waits(&[member(true, 3, true), member(true, 3, true), member(false, 0, false)]),
        "a newcomer is nobody else"
    );
    assert!(!waits(&[member(false, 0, false)]));
}

#[test]
fn a_new_job_waits_for_its_members_and_a_running_one_for_none() {
    let alone = [participant("a", standing(false, 0))];
    assert_eq!(judge(1, &alone, NEED, None), Verdict::Wait(Wait::Members { found: 1, needed: 2 }));
    let running = [participant("a", standing(true, 1))];
    assert!(matches!(judge(2, &running, NEED, None), Verdict::New(_)));
    let seats = Need { is_always: true, ..NEED };
    assert_eq!(judge(2, &running, seats, None), Verdict::Wait(Wait::Members { found: 1, needed: 2 }));
}

#[test]
fn replica_nodes_have_the_last_ranks_and_keys_come_before_names() {
    let mut members = [
        participant("a", standing(false, 0)),
        participant("b", standing(false, 0)),
        participant("c", standing(false, 0)),
    ];
    members[0].trains = false;
    members[1].rank_key = "1".into();
    members[2].rank_key = "0".into();
    let Verdict::New(agreement) = judge(1, &members, NEED, None) else { panic!("two members train") };
    assert_eq!((agreement.members, agreement.num_trainers), (vec!["c".into(), "b".into(), "a".into()], 2));
}

/// "b" asked while it trained, and died. The report that the Lighthouse still passes on shows whether it had taken a
/// step.
#[test]
fn only_a_job_that_has_taken_a_step_is_never_started_again() {
    for has_progress in [false, true] {
        let mut member = Protocol::new(settings());
        let commands = member.handle(Event::Look { until: 9 }).unwrap();
        let [Command::Ask { standing, .. }] = &commands[..] else { panic!("{commands:?}") };
        let own = participant("a", standing.clone());
        let b = Standing { has_progress, state: 1, epoch: Some(7), ..self::standing(true, 2) };
        let b = Participant { waits: false, ..participant("b", b) };
        let commands =
            member.handle(Event::Quorum { id: 2, participants: vec![own, b], is_promoted: false }).unwrap();
        assert_eq!(commands, [Command::Wait(Wait::Training)]);
        let commands = member.handle(Event::Waited).unwrap();
        let [Command::Ask { standing, .. }] = &commands[..] else { panic!("{commands:?}") };
        let both = ["a", "c"].map(|id| participant(id, standing.clone())).to_vec();
        member.handle(Event::Quorum { id: 3, participants: both, is_promoted: false }).unwrap();
        member.handle(Event::Connected).unwrap();
        let commands = member.handle(Event::Recalled { votes: vec![None, None] }).unwrap();
        let restore = Command::Restore { version: 0, established: false, saw_progress: has_progress };
        assert_eq!(commands, [restore]);
    }
}

/// "a" has finished together with members that have left, and "b" was away for the last steps: together the two might
/// hold the complete previous state.
#[test]
fn a_member_that_was_away_takes_nobody_back_from_the_end() {
    let a = participant("a", Standing { is_done: true, state: 2, ..standing(true, 1) });
    let b = participant("b", Standing { state: 1, ..standing(true, 1) });
    let new = participant("n", Standing { state: 0, ..standing(false, 0) });
    let stay = |ids: &[&str]| Verdict::Cut(ids.iter().map(|&id| id.to_owned()).collect());
    assert_eq!(judge(2, &[a.clone(), b.clone()], NEED, None), stay(&["a"]));
    assert_eq!(judge(2, &[a.clone(), b.clone(), new.clone()], NEED, None), stay(&["a", "n"]));
    assert!(matches!(judge(2, &[a, new], NEED, None), Verdict::New(_)));
}
