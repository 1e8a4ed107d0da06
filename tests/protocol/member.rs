//! Reactions of a member to votes, losses and recoveries.

use super::*;

#[test]
fn a_step_is_taken_when_all_have_voted_and_reported_at_the_next_vote() {
    let mut member = trained_with_b();
    member.handle(Event::Gradients { is_whole: true, leaves: false, lag: 0 }).unwrap();
    let commands =
        member.handle(Event::Tally { votes: 2, leaving: 0, newcomer_seen: 0, sums: vec![7] }).unwrap();
    let vote = Passed { before: version_of(1, 0), after: version_of(1, 1), sums: vec![7] };
    assert_eq!(commands, [Command::Take { vote, is_recalled: false }]);
    assert_eq!(member.handle(Event::Look { until: 9 }).unwrap(), [Command::Step { number: 1 }]);
    member.handle(Event::Gradients { is_whole: true, leaves: false, lag: 0 }).unwrap();
    let commands =
        member.handle(Event::Tally { votes: 2, leaving: 0, newcomer_seen: 0, sums: vec![8] }).unwrap();
    assert!(matches!(commands[..], [Command::Commit { step: 0 }, Command::Take { .. }]));
}

/// A version of the copies takes three steps from version 1 on: steps are reported with the votes that need complete
/// ones.
#[test]
fn steps_are_reported_once_a_version_that_has_them_is_whole() {
    let mut member = trained_with_b();
    let mut reported = Vec::new();
    for lag in [0, 1, 2, 2, 3, 4, 2] {
        member.handle(Event::Gradients { is_whole: true, leaves: false, lag }).unwrap();
        let tally = Event::Tally { votes: 2, leaving: 0, newcomer_seen: 0, sums: vec![7] };
        let steps = member.handle(tally).unwrap().into_iter().filter_map(|command| match command {
            Command::Commit { step } => Some(step),
            _ => None,
        });
        reported.push(steps.collect::<Vec<_>>());
        member.handle(Event::Look { until: 9 }).unwrap();
    }
    let none = Vec::new;
    assert_eq!(reported, [none(), none(), none(), vec![0], none(), none(), vec![1, 2, 3]]);
}

#[test]
fn a_step_that_some_did_not_vote_for_is_not_taken() {
    let mut member = trained_with_b();
    member.handle(Event::Gradients { is_whole: true, leaves: false, lag: 0 }).unwrap();
    let commands =
        member.handle(Event::Tally { votes: 1, leaving: 0, newcomer_seen: 0, sums: vec![] }).unwrap();
    assert!(matches!(&commands[..], [Command::Drop { reason }] if reason.starts_with("1 of 2")));
    assert_eq!(member.version(), version_of(1, 0));
}

#[test]
fn a_member_that_lost_its_peer_in_the_vote_takes_the_step_that_the_peer_has_seen_pass() {
    for has_passed in [false, true] {
        let mut member = trained_with_b();
        member.handle(Event::Gradients { is_whole: true, leaves: false, lag: 0 }).unwrap();
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

/// "a" votes on a step with "b" and, after a failure, on the same step again: the update that a third member saw pass
/// in the first group is not the one for which "a" has gradients now.
#[test]
fn a_vote_of_an_earlier_group_does_not_pass_for_the_one_that_is_pending() {
    let mut member = trained_with_b();
    member.handle(Event::Gradients { is_whole: true, leaves: false, lag: 0 }).unwrap();
    member.handle(Event::Tally { votes: 2, leaving: 0, newcomer_seen: 0, sums: vec![7] }).unwrap();
    member.handle(Event::Look { until: 9 }).unwrap();
    member.handle(Event::Gradients { is_whole: true, leaves: false, lag: 0 }).unwrap();
    member.handle(Event::Lost { reason: "c is slow".into() }).unwrap();
    regroup(&mut member, 2, vec![None, None]);
    member.handle(Event::Restored { version: version_of(1, 1), is_stale: false }).unwrap();
    member.handle(Event::Counted).unwrap();
    member.handle(Event::Protected { is_whole: true }).unwrap();
    member.handle(Event::Gradients { is_whole: true, leaves: false, lag: 0 }).unwrap();
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
        member.handle(Event::Gradients { is_whole: true, leaves: false, lag: 0 }).unwrap();
        member.handle(Event::Tally { votes: 2, leaving: 0, newcomer_seen: 0, sums: vec![7] }).unwrap();
        member.handle(Event::Lost { reason: "it was asleep".into() }).unwrap();
        regroup(&mut member, 2, vec![None, None]);
        member.handle(Event::Restored { version: restored, is_stale: false }).unwrap();
        member.handle(Event::Counted).unwrap();
        let mut commands = member.handle(Event::Protected { is_whole: true }).unwrap();
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
    let commands = member.handle(Event::Counted).unwrap(); // the losses are part of the state, too
    assert_eq!(commands, [Command::Protect { version: version_of(3, 4), generation: 4, waits: true }]);
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
    assert!(refused.contains("Connected does not answer the current command: Stepping"), "{refused}");
    assert_eq!(member, before);
}

#[test]
fn a_member_leaves_when_the_copies_of_its_last_step_are_whole() {
    for (leaves, leaving) in [(true, 1), (true, 2), (false, 1)] {
        let mut member = trained_with_b();
        member.handle(Event::Gradients { is_whole: true, leaves, lag: 0 }).unwrap();
        let commands =
            member.handle(Event::Tally { votes: 2, newcomer_seen: 0, leaving, sums: vec![7] }).unwrap();
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
        member.handle(Event::Gradients { is_whole: true, leaves, lag: 0 }).unwrap();
        let leaving = usize::from(leaves);
        let commands =
            member.handle(Event::Tally { votes: 2, newcomer_seen: 0, leaving, sums: vec![7] }).unwrap();
        assert!(matches!(commands.last(), Some(Command::Take { .. })));
        let commands = member.handle(Event::Look { until: 2 }).unwrap();
        assert_eq!(commands, [if leaves { Command::Settle } else { Command::Step { number: 1 } }]);
    }
}

/// Of "a" to "e", "d" and "e" leave, which "b" and "c" know. Their reports before and after the vote might each let one
/// of them continue with "a", but the two must not meet.
#[test]
fn members_that_were_told_differently_do_not_meet() {
    let need = Need { is_majority: true, ..NEED };
    let told = |id: &str, leaves| {
        let last_group = Some(LastGroup { leaves, ..seated(1, 5, id == "a") });
        participant(id, Standing { last_group, ..standing(true, 5) })
    };
    let epoch = |d, e| match judge(1, &[told("a", false), told("d", d), told("e", e)], need, None) {
        Verdict::New(agreement) => agreement.epoch,
        other => panic!("{other:?}"),
    };
    assert_ne!(epoch(true, false), epoch(false, true));
    assert_eq!(epoch(false, false), epoch(false, false));
}

#[test]
fn steps_are_reported_once_the_copies_that_a_recovery_makes_beside_training_are_whole() {
    let mut member = trained_with_b();
    member.handle(Event::Gradients { is_whole: true, leaves: false, lag: 0 }).unwrap();
    member.handle(Event::Tally { votes: 2, leaving: 0, newcomer_seen: 0, sums: vec![7] }).unwrap();
    member.handle(Event::Lost { reason: "b is slow".into() }).unwrap();
    regroup(&mut member, 2, vec![None, None]);
    member.handle(Event::Restored { version: version_of(1, 1), is_stale: false }).unwrap();
    let commands = member.handle(Event::Counted).unwrap();
    assert_eq!(commands, [Command::Protect { version: version_of(1, 1), generation: 2, waits: false }]);
    let commands = member.handle(Event::Protected { is_whole: false }).unwrap();
    assert!(!commands.iter().any(|command| matches!(command, Command::Commit { .. })));
    assert_eq!(commands.last(), Some(&Command::Step { number: 1 }));
    member.handle(Event::Gradients { is_whole: true, leaves: false, lag: 0 }).unwrap();
    let commands =
        member.handle(Event::Tally { votes: 2, leaving: 0, newcomer_seen: 0, sums: vec![8] }).unwrap();
    assert!(matches!(commands[..], [Command::Commit { step: 0 }, Command::Take { .. }]));
}

#[test]
fn training_waits_for_copies_at_the_start_and_before_the_end() {
    for (restored, until, waits) in [(0, 9, true), (version_of(1, 4), 9, false), (version_of(1, 4), 4, true)]
    {
        let mut member = Protocol::new(settings());
        let commands = member.handle(Event::Look { until }).unwrap();
        let [Command::Ask { standing, .. }] = &commands[..] else { panic!("{commands:?}") };
        let participants = vec![participant("a", standing.clone()), participant("b", standing.clone())];
        member.handle(Event::Quorum { id: 1, participants, is_promoted: false }).unwrap();
        member.handle(Event::Connected).unwrap();
        member.handle(Event::Recalled { votes: vec![None, None] }).unwrap();
        member.handle(Event::Restored { version: restored, is_stale: false }).unwrap();
        let commands = member.handle(Event::Counted).unwrap();
        assert!(
            matches!(commands[..], [Command::Protect { waits: found, .. }] if found == waits),
            "{commands:?}"
        );
    }
}
