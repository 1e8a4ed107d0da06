//! Spares: members that wait until a training member is missing.

use super::*;

/// A spare of a job in which `members` train, with the report in its first question.
fn spare(members: usize) -> (Protocol, Standing) {
    let mut spare = Protocol::new(Settings { id: "s".into(), is_spare: true, members, ..settings() });
    let commands = spare.handle(Event::Look { until: 9 }).unwrap();
    let [Command::Ask { standing, .. }] = &commands[..] else { panic!("{commands:?}") };
    assert!(standing.is_spare);
    (spare, standing.clone())
}

fn quorum(id: u64, participants: Vec<Participant>) -> Event {
    Event::Quorum { id, participants, is_promoted: false }
}

#[test]
fn a_spare_waits_while_all_are_there_and_is_in_the_set_that_lacks_one() {
    let (mut member, told) = spare(2);
    let [a, b] = ["a", "b"].map(|id| participant(id, standing(true, 2)));
    let commands = member.handle(quorum(2, vec![a, b, participant("s", told.clone())])).unwrap();
    assert_eq!(commands, [Command::Wait(Wait::Spare)]);
    let commands = member.handle(Event::Waited).unwrap();
    let [Command::Ask { standing: again, .. }] = &commands[..] else { panic!("{commands:?}") };
    assert_eq!(*again, told, "it vouches for no set in which the others may have gone on without it");
    let a = participant("a", Standing { named: vec![(2, 2)], ..standing(true, 2) });
    let commands = member.handle(quorum(3, vec![a, participant("s", told)])).unwrap();
    assert!(matches!(&commands[..], [Command::Connect { members, .. }] if members == &["a", "s"]));
    let commands = member.handle(Event::Lost { reason: "a is gone".into() }).unwrap();
    assert!(matches!(commands[..], [Command::Drop { .. }]));
    let commands = member.handle(Event::Look { until: 9 }).unwrap();
    assert!(
        matches!(&commands[..], [Command::Ask { standing, .. }] if !standing.is_spare),
        "it takes part now"
    );
}

#[test]
fn a_new_job_begins_with_a_spare_once_that_has_waited_for_others() {
    for is_patient in [true, false] {
        let (mut member, told) = spare(2);
        let own = Participant { is_patient, ..participant("s", told) };
        let commands = member.handle(quorum(1, vec![participant("a", standing(false, 0)), own])).unwrap();
        match is_patient {
            true => assert_eq!(commands, [Command::Wait(Wait::Spare)]),
            false => {
                assert!(matches!(&commands[..], [Command::Connect { members, .. }] if members.len() == 2))
            }
        }
    }
}

#[test]
fn members_do_not_call_for_an_agreement_because_of_a_spare() {
    for (is_spare, calls) in [(true, false), (false, true)] {
        let mut member = began_with("b", Settings { members: 2, ..settings() });
        let told = Standing { is_spare, ..standing(false, 0) };
        let [a, b] = ["a", "b"].map(|id| Participant { waits: false, ..participant(id, standing(true, 2)) });
        let participants = vec![a, b, participant("s", told)];
        assert_eq!(member.handle(Event::Overheard { id: 2, participants, is_refused: false }).unwrap(), []);
        let commands = member.handle(Event::Gradients { is_whole: true, leaves: false, lag: 0 }).unwrap();
        assert_eq!(commands, [Command::Vote { version: version_of(1, 0), calls }]);
    }
}

#[test]
fn a_spare_learns_of_the_end_from_those_that_close() {
    for (is_done, waits, stops) in [(true, false, true), (true, true, false), (false, false, false)] {
        let (mut member, told) = spare(1);
        let a = Participant { waits, ..participant("a", Standing { is_done, ..standing(true, 1) }) };
        let commands = member.handle(quorum(2, vec![a, participant("s", told)])).unwrap();
        assert_eq!(commands[0] == Command::Stop(Stop::Finished), stops, "{commands:?}");
        assert_eq!(member.is_over(), stops);
    }
}

#[test]
fn members_tell_the_end_only_where_spares_wait() {
    for waits in [true, false] {
        let mut member = began_with("b", Settings { members: 2, ..settings() });
        let spare = participant("s", Standing { is_spare: true, ..standing(false, 0) });
        let [a, b] = ["a", "b"].map(|id| Participant { waits: false, ..participant(id, standing(true, 2)) });
        let participants = [vec![a, b], if waits { vec![spare] } else { vec![] }].concat();
        assert_eq!(member.handle(Event::Overheard { id: 2, participants, is_refused: false }).unwrap(), []);
        member.handle(Event::Gradients { is_whole: true, leaves: false, lag: 0 }).unwrap();
        member.handle(Event::Tally { votes: 2, leaving: 0, newcomer_seen: 0, sums: vec![] }).unwrap();
        member.handle(Event::Look { until: 1 }).unwrap();
        member.handle(Event::Settled { is_whole: true }).unwrap();
        let commands = member.handle(Event::Parted).unwrap();
        let [Command::Close { standing }] = &commands[..] else { panic!("{commands:?}") };
        assert_eq!(standing.as_ref().map(|each| each.is_done), waits.then_some(true));
    }
}

#[test]
fn survivors_take_as_many_spares_as_members_are_missing() {
    let mut member = began_with("b", Settings { members: 2, ..settings() });
    member.handle(Event::Lost { reason: "b is gone".into() }).unwrap();
    let commands = member.handle(Event::Look { until: 9 }).unwrap();
    let [Command::Ask { standing: own, .. }] = &commands[..] else { panic!("{commands:?}") };
    let told = Standing { is_spare: true, ..standing(false, 0) };
    let participants =
        vec![participant("t", told.clone()), participant("s", told), participant("a", own.clone())];
    let commands = member.handle(quorum(2, participants)).unwrap();
    assert!(matches!(&commands[..], [Command::Connect { members, .. }] if members == &["a", "s"]));
}
