//! The commit protocol of one member: what it says to each event.

use evermoe::protocol::{
    Begun, Command, Event, Need, Participant, Passed, Protocol, Seat, Settings, Standing, Stop, Verdict,
    Wait, judge, step_of, version_of,
};

const NEED: Need = Need { members: 2, is_always: false, goes_on_alone: false, is_majority: false };

fn settings() -> Settings {
    Settings {
        id: "a".into(),
        trains: true,
        members: 1,
        is_fixed: false,
        goes_on_alone: false,
        needs_majority: false,
        join_every: 5,
        rebalance_every: 0,
        generation: 0,
    }
}

fn participant(id: &str, standing: Standing) -> Participant {
    Participant {
        id: id.into(),
        rank_key: String::new(),
        trains: true,
        waits: true,
        is_patient: false,
        unreachable: vec![],
        standing,
    }
}

fn standing(established: bool, size: usize) -> Standing {
    let adopted = u64::from(established);
    Standing {
        epoch: None,
        established,
        size,
        generation: 1,
        state: 0,
        has_progress: false,
        named: vec![],
        adopted,
        inquires: false,
        is_done: false,
        seat: None,
        known: 0,
        begun: vec![],
    }
}

/// A member that has begun a job with "b", and computes step 0.
fn trained_with_b() -> Protocol {
    began_with("b", settings())
}

fn began_with(other: &str, settings: Settings) -> Protocol {
    let id = settings.id.clone();
    let mut member = Protocol::new(settings);
    let commands = member.handle(Event::Look { until: 9 }).unwrap();
    let [Command::Ask { standing, .. }] = &commands[..] else { panic!("{commands:?}") };
    let participants = vec![participant(&id, standing.clone()), participant(other, standing.clone())];
    member.handle(Event::Quorum { id: 1, participants, is_promoted: false }).unwrap();
    member.handle(Event::Connected).unwrap();
    member.handle(Event::Recalled { votes: vec![None, None] }).unwrap();
    member.handle(Event::Restored { version: 0, is_stale: false }).unwrap();
    member.handle(Event::Counted).unwrap();
    let commands = member.handle(Event::Protected).unwrap();
    assert!(matches!(
        commands[..],
        [Command::Resume { .. }, Command::Inquire { .. }, Command::Step { number: 0 }]
    ));
    member
}

/// A member that has lost its group meets "b" in the set `id`, and recalls these votes.
fn regroup(member: &mut Protocol, id: u64, votes: Vec<Option<Passed>>) -> Vec<Command> {
    let commands = member.handle(Event::Look { until: 9 }).unwrap();
    let [Command::Ask { standing, .. }] = &commands[..] else { panic!("{commands:?}") };
    let participants = vec![participant("a", standing.clone()), participant("b", standing.clone())];
    let commands = member.handle(Event::Quorum { id, participants, is_promoted: false }).unwrap();
    assert!(
        matches!(commands[..], [Command::Connect { generation, .. }] if generation == id),
        "{commands:?}"
    );
    member.handle(Event::Connected).unwrap();
    member.handle(Event::Recalled { votes }).unwrap()
}

#[test]
fn a_member_that_was_left_behind_goes_on_if_its_operator_says_so() {
    let alone = [participant("a", Standing { adopted: 3, named: vec![], ..standing(true, 2) })];
    assert_eq!(judge(5, &alone, NEED, None), Verdict::LeftBehind { adopted: 3 });
    let need = Need { goes_on_alone: true, ..NEED };
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
fn a_step_is_taken_when_all_have_voted_and_reported_at_the_next_vote() {
    let mut member = trained_with_b();
    member.handle(Event::Gradients { is_whole: true, leaves: false }).unwrap();
    let commands = member.handle(Event::Tally { votes: 2, leaving: 0, calling: 0, sums: vec![7] }).unwrap();
    let vote = Passed { before: version_of(1, 0), after: version_of(1, 1), sums: vec![7] };
    assert_eq!(commands, [Command::Take { vote, is_recalled: false }]);
    assert_eq!(member.handle(Event::Look { until: 9 }).unwrap(), [Command::Step { number: 1 }]);
    member.handle(Event::Gradients { is_whole: true, leaves: false }).unwrap();
    let commands = member.handle(Event::Tally { votes: 2, leaving: 0, calling: 0, sums: vec![8] }).unwrap();
    assert!(matches!(commands[..], [Command::Commit { step: 0 }, Command::Take { .. }]));
}

#[test]
fn a_step_that_some_did_not_vote_for_is_not_taken() {
    let mut member = trained_with_b();
    member.handle(Event::Gradients { is_whole: true, leaves: false }).unwrap();
    let commands = member.handle(Event::Tally { votes: 1, leaving: 0, calling: 0, sums: vec![] }).unwrap();
    assert!(matches!(&commands[..], [Command::Drop { reason }] if reason.starts_with("1 of 2")));
    assert_eq!(member.version(), version_of(1, 0));
}

#[test]
fn a_member_that_lost_its_peer_in_the_vote_takes_the_step_that_the_peer_has_seen_pass() {
    for has_passed in [false, true] {
        let mut member = trained_with_b();
        member.handle(Event::Gradients { is_whole: true, leaves: false }).unwrap();
        member.handle(Event::Lost { reason: "b is slow".into() }).unwrap();
        let vote = Passed { before: version_of(1, 0), after: version_of(1, 1), sums: vec![7] };
        let commands = regroup(&mut member, 2, vec![None, has_passed.then(|| vote.clone())]);
        let restore = |version| Command::Restore { version, established: true, saw_progress: false };
        if has_passed {
            assert_eq!(commands, [Command::Take { vote, is_recalled: true }, restore(version_of(1, 1))]);
        } else {
            assert_eq!(commands, [restore(version_of(1, 0))]);
        }
    }
}

/// "a" votes on a step with "b" and, after a failure, on the same step again: what a third member has seen pass in the
/// first group was another update than the one that "a" has gradients for now.
#[test]
fn a_vote_of_an_earlier_group_does_not_pass_for_the_one_that_is_pending() {
    let mut member = trained_with_b();
    member.handle(Event::Gradients { is_whole: true, leaves: false }).unwrap();
    member.handle(Event::Tally { votes: 2, leaving: 0, calling: 0, sums: vec![7] }).unwrap();
    member.handle(Event::Look { until: 9 }).unwrap();
    member.handle(Event::Gradients { is_whole: true, leaves: false }).unwrap();
    member.handle(Event::Lost { reason: "c is slow".into() }).unwrap();
    regroup(&mut member, 2, vec![None, None]);
    member.handle(Event::Restored { version: version_of(1, 1), is_stale: false }).unwrap();
    member.handle(Event::Counted).unwrap();
    member.handle(Event::Protected).unwrap();
    member.handle(Event::Gradients { is_whole: true, leaves: false }).unwrap();
    member.handle(Event::Lost { reason: "b is slow".into() }).unwrap();
    let first = Passed { before: version_of(1, 1), after: version_of(1, 2), sums: vec![8] };
    let restore = Command::Restore { version: version_of(1, 1), established: true, saw_progress: true };
    assert_eq!(regroup(&mut member, 3, vec![None, Some(first)]), [restore]);
}

#[test]
fn steps_that_others_took_while_a_member_was_away_are_theirs_to_report() {
    for (restored, reported) in
        [(version_of(2, 4), vec![]), (version_of(1, 1), vec![Command::Commit { step: 0 }])]
    {
        let mut member = trained_with_b();
        member.handle(Event::Gradients { is_whole: true, leaves: false }).unwrap();
        member.handle(Event::Tally { votes: 2, leaving: 0, calling: 0, sums: vec![7] }).unwrap();
        member.handle(Event::Lost { reason: "it was asleep".into() }).unwrap();
        regroup(&mut member, 2, vec![None, None]);
        member.handle(Event::Restored { version: restored, is_stale: false }).unwrap();
        member.handle(Event::Counted).unwrap();
        let mut commands = member.handle(Event::Protected).unwrap();
        let rest = commands.split_off(reported.len());
        assert_eq!(rest.first(), Some(&Command::Resume { version: restored }));
        assert_eq!(rest.last(), Some(&Command::Step { number: step_of(restored) }));
        assert_eq!(commands, reported);
    }
}

#[test]
fn a_state_with_older_experts_gets_a_version_of_its_own() {
    let mut member = trained_with_b();
    member.handle(Event::Lost { reason: "b is gone".into() }).unwrap();
    let commands = member.handle(Event::Look { until: 9 }).unwrap();
    let [Command::Ask { standing, .. }] = &commands[..] else { panic!("{commands:?}") };
    let alone = vec![participant("a", standing.clone())];
    member.handle(Event::Quorum { id: 2, participants: alone, is_promoted: false }).unwrap();
    member.handle(Event::Connected).unwrap();
    member.handle(Event::Recalled { votes: vec![None] }).unwrap();
    let commands = member.handle(Event::Restored { version: version_of(1, 4), is_stale: true }).unwrap();
    assert_eq!(commands, [Command::CountLosses { version: version_of(2, 4) }]);
    let commands = member.handle(Event::Counted).unwrap(); // what was lost is part of the state, too
    assert_eq!(commands, [Command::Protect { version: version_of(3, 4), generation: 4 }]);
}

#[test]
fn units_that_nobody_has_end_the_job_unless_all_its_steps_are_done() {
    for until in [9, 0] {
        let mut member = trained_with_b();
        member.handle(Event::Lost { reason: "b is gone".into() }).unwrap();
        let commands = member.handle(Event::Look { until }).unwrap();
        let [Command::Ask { standing, .. }] = &commands[..] else { panic!("{commands:?}") };
        let alone = vec![participant("a", standing.clone())];
        member.handle(Event::Quorum { id: 2, participants: alone, is_promoted: false }).unwrap();
        member.handle(Event::Connected).unwrap();
        member.handle(Event::Recalled { votes: vec![None] }).unwrap();
        let commands = member.handle(Event::Unrecoverable).unwrap();
        assert_eq!(commands, [Command::Stop(Stop::UnitsLost)], "it has said no farewell");
    }
}

#[test]
fn an_event_that_answers_nothing_is_refused_and_changes_nothing() {
    let mut member = trained_with_b();
    let before = member.clone();
    let refused = member.handle(Event::Connected).unwrap_err().to_string();
    assert!(refused.contains("Connected does not answer what is under way: Stepping"), "{refused}");
    assert_eq!(member, before);
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

#[test]
fn a_member_leaves_when_the_copies_of_its_last_step_are_whole() {
    for (leaves, leaving) in [(true, 1), (true, 2), (false, 1)] {
        let mut member = trained_with_b();
        member.handle(Event::Gradients { is_whole: true, leaves }).unwrap();
        let commands = member.handle(Event::Tally { votes: 2, calling: 0, leaving, sums: vec![7] }).unwrap();
        assert!(matches!(commands[..], [Command::Take { .. }, Command::Settle]), "{commands:?}");
        let commands = member.handle(Event::Settled { is_whole: true }).unwrap();
        let [Command::Commit { step: 0 }, last] = &commands[..] else { panic!("{commands:?}") };
        if leaves {
            assert_eq!(*last, Command::Leave);
            assert!(member.is_over());
        } else {
            assert_eq!(*last, Command::Drop { reason: "1 member has left the job".into() });
            let commands = member.handle(Event::Look { until: 9 }).unwrap();
            assert!(matches!(commands[..], [Command::Ask { is_intact: false, .. }]));
        }
    }
}

#[test]
fn nobody_leaves_before_the_end_of_the_last_step() {
    let mut member = trained_with_b();
    for leaves in [false, true] {
        member.handle(Event::Gradients { is_whole: true, leaves }).unwrap();
        let leaving = usize::from(leaves);
        let commands = member.handle(Event::Tally { votes: 2, calling: 0, leaving, sums: vec![7] }).unwrap();
        assert!(matches!(commands.last(), Some(Command::Take { .. })));
        let commands = member.handle(Event::Look { until: 2 }).unwrap();
        assert_eq!(commands, [if leaves { Command::Settle } else { Command::Step { number: 1 } }]);
    }
}

fn seated(epoch: u64, size: usize, is_first: bool) -> Seat {
    Seat { epoch, generation: epoch, size, is_first, leaves: false, left: 0 }
}

/// "a" and "b" were connected with "c" and "d". Who stays and knows that others left does not need them; where nobody
/// knows, a leaver is as good as lost for the rest, who may know it.
#[test]
fn members_that_left_do_not_count_and_a_leaver_counts_only_with_more_than_half_of_the_rest() {
    let need = Need { is_majority: true, ..NEED };
    let minority = |found, size| Verdict::Wait(Wait::Minority { found, size });
    let seat = |leaves, left| move |size, is_first| Some(Seat { leaves, left, ..seated(2, size, is_first) });
    let (stays, leaves, knows) = (seat(false, 0), seat(true, 0), seat(false, 1));
    let judge = |set: &[(&str, Option<Seat>)]| {
        let told = |(id, seat): &(&str, Option<Seat>)| {
            participant(id, Standing { seat: seat.clone(), ..standing(true, 2) })
        };
        judge(1, &set.iter().map(told).collect::<Vec<_>>(), need, None)
    };
    let goes_on = |set: &[(&str, Option<Seat>)]| matches!(judge(set), Verdict::New(_));
    // Of two "a" leaves. "b" alone knows it, or it does not; "a" cannot know whether "b" does.
    assert!(goes_on(&[("b", knows(2, false))]));
    assert_eq!(judge(&[("b", stays(2, false))]), minority(1, 2));
    assert_eq!(judge(&[("a", leaves(2, true))]), minority(0, 1));
    assert!(goes_on(&[("a", leaves(2, true)), ("b", stays(2, false))]), "it leaves after another vote");
    // Of four.
    assert_eq!(judge(&[("a", leaves(4, true)), ("b", stays(4, false))]), minority(1, 3));
    assert!(goes_on(&[("c", knows(4, false)), ("d", knows(4, false))]), "two of three");
    assert!(goes_on(&[("a", leaves(4, true)), ("b", stays(4, false)), ("c", stays(4, false))]));
    // Of three, and "c" is lost: had it gone on without "a", it would be half of the rest without the lowest id.
    assert!(goes_on(&[("a", leaves(3, true)), ("b", stays(3, false))]));
    assert_eq!(judge(&[("c", knows(3, false))]), minority(1, 2));
}

/// In set 1 "a", "b" and "c" are connected, "d" joins, and all four begin that group: "a" and "d" hear that all have come,
/// "b" and "c" do not. "a", "b" and "d" begin it once more. After a cut only "a" and "d" may go on.
#[test]
fn a_group_that_was_begun_twice_counts_both_times() {
    let need = Need { is_majority: true, ..NEED };
    let members: Vec<String> = ["a", "b", "c", "d"].map(String::from).to_vec();
    let told = |id: &str, seat: Option<(u64, usize, bool)>, groups: &[(u64, u64)]| {
        let seat = seat.map(|(at, size, is_first)| seated(at, size, is_first));
        let begun = Begun { members: members.clone(), groups: groups.to_vec() };
        let begun = if groups.is_empty() { vec![] } else { vec![begun] };
        participant(id, Standing { generation: 3, seat, begun, ..standing(true, 4) })
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
    // Whoever has begun a group counts for it, whatever it has begun since.
    assert!(matches!(judge(&[&d, &b, &c]), Verdict::New(_)));
    assert_eq!(judge(&[&d]), Verdict::Wait(Wait::Minority { found: 1, size: 4 }));
}

/// "b" has gone on without "a", and both are connected when they are cut again: "a" has no state of "b"'s yet. The same for
/// newcomers that have begun a group with a member of a job.
#[test]
fn only_those_with_the_newest_state_that_they_know_of_go_on() {
    let need = Need { is_majority: true, ..NEED };
    let told =
        |id: &str, state, known, seat| participant(id, Standing { state, known, seat, ..standing(true, 2) });
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

/// "a" and "b" leave at the same vote, and "b" does not hear that its copies are settled.
#[test]
fn a_member_whose_others_left_with_it_waits_for_nobody() {
    for leaving in [1, 2] {
        let mut member = began_with("a", Settings { id: "b".into(), needs_majority: true, ..settings() });
        member.handle(Event::Gradients { is_whole: true, leaves: true }).unwrap();
        member.handle(Event::Tally { votes: 2, calling: 0, leaving, sums: vec![7] }).unwrap();
        member.handle(Event::Lost { reason: "it is gone".into() }).unwrap();
        let commands = member.handle(Event::Look { until: 9 }).unwrap();
        let Some(Command::Ask { standing, .. }) = commands.last() else { panic!("{commands:?}") };
        let participants = vec![participant("b", standing.clone())];
        let commands = member.handle(Event::Quorum { id: 2, participants, is_promoted: false }).unwrap();
        let waits = Command::Wait(Wait::Minority { found: 0, size: 1 });
        assert_eq!(commands, [if leaving == 2 { Command::Leave } else { waits }]);
    }
}

/// "d" alone has begun a group with "b" and "c" while these were connected with "a"; then they left on notice.
#[test]
fn a_group_of_the_generation_of_a_connected_one_was_never_connected() {
    let need = Need { is_majority: true, ..NEED };
    let seat = Some(Seat { left: 2, ..seated(2, 3, true) });
    let a = participant("a", Standing { generation: 2, seat, ..standing(true, 3) });
    let members = ["b", "c", "d"].map(String::from).to_vec();
    let begun = vec![Begun { members, groups: vec![(9, 2)] }];
    let seat = Some(seated(1, 4, false));
    let d = participant("d", Standing { generation: 2, seat, begun, ..standing(true, 4) });
    assert!(matches!(judge(1, &[a, d], need, None), Verdict::New(_)));
}

/// Of "a" to "e", "d" and "e" leave, which "b" and "c" know. What one of them told before the vote and the other one after
/// it might each go on with "a", but not meet.
#[test]
fn members_that_were_told_differently_do_not_meet() {
    let need = Need { is_majority: true, ..NEED };
    let told = |id: &str, leaves| {
        let seat = Some(Seat { leaves, ..seated(1, 5, id == "a") });
        participant(id, Standing { seat, ..standing(true, 5) })
    };
    let epoch = |d, e| match judge(1, &[told("a", false), told("d", d), told("e", e)], need, None) {
        Verdict::New(agreement) => agreement.epoch,
        other => panic!("{other:?}"),
    };
    assert_ne!(epoch(true, false), epoch(false, true));
    assert_eq!(epoch(false, false), epoch(false, false));
}

/// "b" asked while it trained, and died. What the Lighthouse still passes on says whether it had taken a step.
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

/// "a" has come to the end with others that are through, and "b" was away for the last steps: together they might have all
/// of the state before.
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
