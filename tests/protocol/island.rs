//! Islands: members that take part together or not at all.

use super::*;
use evermoe::protocol::{Island, Refused, reach_each_other, without_incomplete_islands};

/// The member `id` of "a", "b", "c" and "d": the first two are the island "x", the others the island "y".
fn in_island(id: &str, standing: Standing) -> Participant {
    let number = usize::from(id.as_bytes()[0] - b'a');
    let name = ["x", "y"][number / 2].to_owned();
    let rank_key = format!("{name}/{}", number % 2);
    let island = Some(Island { name, position: number % 2, size: 2 });
    Participant { rank_key, island, ..participant(id, standing) }
}

fn islanders(ids: &str, standing: &Standing) -> Vec<Participant> {
    ids.chars().map(|id| in_island(&id.to_string(), standing.clone())).collect()
}

fn quorum(id: u64, participants: Vec<Participant>) -> Event {
    Event::Quorum { id, participants, is_promoted: false }
}

fn asked(commands: &[Command]) -> Standing {
    let [.., Command::Ask { standing, .. }] = commands else { panic!("{commands:?}") };
    standing.clone()
}

/// The member "a" of a job whose sets before `id` it has not adopted, with the report in its question.
fn newcomer() -> (Protocol, Standing) {
    let mut member = Protocol::new(Settings { members: 2, ..settings() });
    let standing = asked(&member.handle(Event::Look { until: 9 }).unwrap());
    (member, standing)
}

/// The member "a" of a job of two islands, whose group is lost after it was adopted in set 1; with its next report.
fn lost() -> (Protocol, Standing) {
    let (mut member, told) = newcomer();
    let commands = member.handle(quorum(1, islanders("abcd", &told))).unwrap();
    assert!(matches!(&commands[..], [Command::Connect { members, .. }] if members == &["a", "b", "c", "d"]));
    for event in [
        Event::Connected,
        Event::Recalled { votes: vec![None; 4] },
        Event::Restored { version: 0, is_stale: false },
        Event::Counted,
        Event::Protected { is_whole: true },
        Event::Lost { reason: "a peer is lost".into() },
    ] {
        member.handle(event).unwrap();
    }
    let standing = asked(&member.handle(Event::Look { until: 9 }).unwrap());
    (member, standing)
}

#[test]
fn an_island_is_complete_if_each_position_is_present_once() {
    let told = standing(true, 4);
    let found = |all: &[Participant]| -> String {
        without_incomplete_islands(all).iter().map(|each| each.id.as_str()).collect()
    };
    assert_eq!(found(&islanders("cadb", &told)), "cadb");
    assert_eq!(found(&islanders("abd", &told)), "ab");
    assert_eq!(found(&islanders("ad", &told)), "");
    let twice = Participant { id: "e".into(), ..in_island("d", told.clone()) };
    assert_eq!(found(&[islanders("abcd", &told), vec![twice]].concat()), "ab");
    let mut larger = islanders("abcd", &told);
    larger[3].island.as_mut().unwrap().size = 3;
    assert_eq!(found(&larger), "ab");
    let beyond = |position| Participant {
        island: Some(Island { name: "x".into(), position, size: 2 }),
        ..in_island("a", told.clone())
    };
    assert_eq!(found(&[beyond(1), beyond(2)]), "");
    assert_eq!(found(&[participant("z", told.clone())]), "z", "a process without an island counts alone");
}

#[test]
fn a_newcomer_waits_for_its_island_and_vouches_for_no_set_without_it() {
    let (mut member, told) = newcomer();
    let others = islanders("cd", &standing(true, 2));
    let alone = [islanders("a", &told), others].concat();
    let commands = member.handle(quorum(2, alone)).unwrap();
    assert_eq!(commands, [Command::Wait(Wait::Island { found: 1, size: 2 })]);
    assert_eq!(asked(&member.handle(Event::Waited).unwrap()), told);
    let refused = |ids| Some(Refused { id: 3, participants: islanders(ids, &told) });
    let unanswered = |ids| Event::Unanswered { reason: "disagreement".into(), refused: refused(ids) };
    assert_eq!(asked(&member.handle(unanswered("acd")).unwrap()), told);
    assert_eq!(asked(&member.handle(unanswered("abcd")).unwrap()).named, [(3, 3)]);
    let commands = member.handle(quorum(4, islanders("ab", &told))).unwrap();
    assert!(matches!(&commands[..], [Command::Connect { members, .. }] if members == &["a", "b"]));
}

/// A member of another island trains, or only it has state of the job: the Lighthouse did not name the rest of its island.
#[test]
fn newcomers_do_not_begin_a_job_that_runs_elsewhere() {
    for waits in [false, true] {
        let (mut member, told) = newcomer();
        let c = Participant { waits, ..in_island("c", standing(true, 2)) };
        let commands = member.handle(quorum(2, [islanders("ab", &told), vec![c]].concat())).unwrap();
        assert_eq!(commands, [Command::Wait(Wait::Training)]);
        assert_eq!(asked(&member.handle(Event::Waited).unwrap()).named, [(2, 2)]);
        let commands = member.handle(quorum(3, islanders("ab", &told))).unwrap();
        assert!(matches!(&commands[..], [Command::Connect { members, .. }] if members == &["a", "b"]));
    }
}

#[test]
fn a_new_job_counts_complete_islands_alone() {
    let mut member = Protocol::new(Settings { members: 4, ..settings() });
    let told = asked(&member.handle(Event::Look { until: 9 }).unwrap());
    let commands = member.handle(quorum(1, islanders("abc", &told))).unwrap();
    assert_eq!(commands, [Command::Wait(Wait::Members { found: 2, needed: 4 })]);
}

#[test]
fn a_member_whose_island_lost_a_process_ends() {
    let (mut member, told) = lost();
    let commands = member.handle(quorum(2, islanders("acd", &told))).unwrap();
    assert_eq!(commands, [Command::Stop(Stop::IslandLost { found: 1, size: 2 })]);
    assert!(member.is_over());
    let (mut member, told) = lost();
    let commands = member.handle(quorum(2, islanders("abd", &told))).unwrap();
    assert!(
        matches!(&commands[..], [Command::Connect { members, num_trainers: 2, .. }] if members == &["a", "b"])
    );
}

/// The Lighthouse has restarted, and "b" has not reached it yet.
#[test]
fn an_island_gives_its_absent_processes_time() {
    let (mut member, told) = lost();
    let patient = |ids| {
        let all = islanders(ids, &told).into_iter();
        all.map(|each| Participant { is_patient: true, ..each }).collect()
    };
    let commands = member.handle(quorum(2, patient("acd"))).unwrap();
    assert_eq!(commands, [Command::Wait(Wait::Absent)]);
    assert_eq!(asked(&member.handle(Event::Waited).unwrap()).named, []);
    assert!(matches!(member.handle(quorum(3, patient("abcd"))).unwrap()[..], [Command::Connect { .. }]));
}

/// "c" asked in the background, and died. For its sake the Lighthouse did not wait for "b".
#[test]
fn an_island_does_not_end_while_reports_are_outdated() {
    let (mut member, told) = lost();
    let c = in_island("c", Standing { epoch: Some(7), ..told.clone() });
    let set = [islanders("ad", &told), vec![Participant { waits: false, ..c }]].concat();
    assert_eq!(member.handle(quorum(2, set)).unwrap(), [Command::Wait(Wait::Unheard)]);
    assert_eq!(asked(&member.handle(Event::Waited).unwrap()).named, []);
}

/// "a" was named in the set 2 with "c" and "d", whose island continued in it.
#[test]
fn an_island_that_was_left_out_does_not_continue_alone() {
    let named = |named: &[(u64, u64)]| {
        let standing = Standing { named: named.to_vec(), ..standing(true, 4) };
        judge(3, &islanders("ab", &standing), NEED, None)
    };
    assert_eq!(named(&[]), Verdict::LeftBehind { adopted: 1 });
    assert!(matches!(named(&[(2, 2)]), Verdict::New(_)));
    // A member that trains hears of the set 2 in the background, and of the set 3.
    for (ids, calls) in [("acd", [].to_vec()), ("abcd", [(2, 2)].to_vec())] {
        let mut member = began_with("b", settings());
        let participants = islanders(ids, &standing(true, 4));
        assert_eq!(member.handle(Event::Overheard { id: 2, participants, is_refused: false }).unwrap(), []);
        member.handle(Event::Lost { reason: "a peer is lost".into() }).unwrap();
        assert_eq!(asked(&member.handle(Event::Look { until: 9 }).unwrap()).named, calls);
    }
}

#[test]
fn members_call_for_an_agreement_once_an_island_of_newcomers_is_complete() {
    for (newcomers, calls) in [("c", false), ("cd", true)] {
        let mut member = began_with("b", Settings { members: 2, ..settings() });
        let trained = islanders("ab", &standing(true, 2)).into_iter();
        let trained = trained.map(|each| Participant { waits: false, ..each }).collect();
        let participants = [trained, islanders(newcomers, &standing(false, 0))].concat();
        member.handle(Event::Overheard { id: 2, participants, is_refused: false }).unwrap();
        let commands = member.handle(Event::Gradients { is_whole: true, leaves: false, lag: 0 }).unwrap();
        assert_eq!(commands, [Command::Vote { version: version_of(1, 0), calls }]);
    }
}

/// Another process claims the position of "b": all members have the same answer.
#[test]
fn an_intact_group_stays_together() {
    let mut member = began_with("b", Settings { members: 2, ..settings() });
    member.handle(Event::Gradients { is_whole: true, leaves: false, lag: 0 }).unwrap();
    let sums = vec![];
    member.handle(Event::Tally { votes: 2, leaving: 0, newcomer_seen: 1, sums }).unwrap();
    let told = asked(&member.handle(Event::Look { until: 9 }).unwrap());
    let mut participants = islanders("ab", &told);
    participants.push(Participant { id: "z".into(), ..in_island("b", standing(false, 0)) });
    let commands = member.handle(quorum(2, participants)).unwrap();
    let [Command::Compare { set }] = commands[..] else { panic!("{commands:?}") };
    let commands = member.handle(Event::Compared { sets: vec![set; 2] }).unwrap();
    assert!(matches!(commands[..], [.., Command::Step { number: 1 }]), "{commands:?}");
}

#[test]
fn an_island_leaves_as_one_if_a_process_of_it_cannot_be_reached() {
    let told = standing(true, 6);
    let apart = |pairs: &[(usize, &str)]| {
        let mut all = islanders("abcd", &told);
        for &(number, other) in pairs {
            all[number].unreachable.push(other.into());
        }
        reach_each_other(&all).into_iter().collect::<String>()
    };
    assert_eq!(apart(&[]), "abcd");
    assert_eq!(apart(&[(1, "c")]), "ab");
    assert_eq!(apart(&[(3, "b")]), "ab");
    assert_eq!(apart(&[(0, "b")]), "cd", "its own processes do not reach each other");
    assert_eq!(apart(&[(0, "b"), (2, "d")]), "");
}

/// It has withdrawn with its island, and comes back first.
#[test]
fn a_member_that_withdrew_waits_for_its_island() {
    let (mut member, told) = lost();
    let mut all = islanders("abcd", &told);
    all[0].unreachable = vec!["b".into()];
    assert_eq!(member.handle(quorum(2, all)).unwrap(), [Command::Withdraw]);
    let told = asked(&member.handle(Event::Waited).unwrap());
    let commands = member.handle(quorum(3, islanders("acd", &told))).unwrap();
    assert_eq!(commands, [Command::Wait(Wait::Island { found: 1, size: 2 })]);
    member.handle(Event::Waited).unwrap();
    assert!(matches!(
        member.handle(quorum(4, islanders("abcd", &told))).unwrap()[..],
        [Command::Connect { .. }]
    ));
}

/// All steps are committed here, so that it has nothing to return for.
#[test]
fn a_member_that_has_finished_ends_without_its_island() {
    let (mut member, _) = newcomer();
    member.handle(quorum(1, islanders("ab", &standing(false, 0)))).unwrap();
    for event in [
        Event::Connected,
        Event::Recalled { votes: vec![None; 2] },
        Event::Restored { version: version_of(1, 9), is_stale: false },
        Event::Counted,
        Event::Protected { is_whole: true },
        Event::Lost { reason: "a peer is lost".into() },
    ] {
        member.handle(event).unwrap();
    }
    let told = asked(&member.handle(Event::Look { until: 9 }).unwrap());
    assert!(told.is_done);
    let commands = member.handle(quorum(2, islanders("a", &told))).unwrap();
    assert_eq!(commands, [Command::Close { standing: None }]);
}
