//! The commit protocol: the answers of one member to each event, and the members that continue.

mod agreement;
mod island;
mod majority;
mod member;
mod spare;

use evermoe::protocol::{
    Begun, Command, Event, LastGroup, Need, Participant, Passed, Protocol, Settings, Standing, Stop, Verdict,
    Wait, judge, step_of, version_of,
};

const NEED: Need = Need { members: 2, is_always: false, allows_solo_resume: false, is_majority: false };

fn settings() -> Settings {
    Settings {
        id: "a".into(),
        trains: true,
        is_spare: false,
        members: 1,
        is_fixed: false,
        allows_solo_resume: false,
        needs_majority: false,
        join_interval: 5,
        rebalance_interval: 0,
        generation: 0,
    }
}

fn participant(id: &str, standing: Standing) -> Participant {
    Participant {
        id: id.into(),
        rank_key: String::new(),
        island: None,
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
        is_spare: false,
        last_group: None,
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
    let commands = member.handle(Event::Protected { is_whole: true }).unwrap();
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

fn seated(epoch: u64, size: usize, is_first: bool) -> LastGroup {
    LastGroup { epoch, generation: epoch, size, is_first, leaves: false, left: 0 }
}
