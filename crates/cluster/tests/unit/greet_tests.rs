//! Greetings with one side that does not play along.

use super::*;
use std::{net::TcpListener, thread};

/// Both ends of a connection.
fn ends() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let here = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (here, listener.accept().unwrap().0)
}

/// What the hub says to a process that does this; nobody may join.
fn hub_against(process: impl FnOnce(TcpStream) + Send) -> String {
    let (here, there) = ends();
    thread::scope(|s| {
        s.spawn(move || process(here));
        let joined =
            greet(&there, GREETING, b"x", |_, _, _| unreachable!("it has not proved that it knows the secret"));
        let (Not::Stranger(why) | Not::Member(why)) = joined.unwrap_err();
        why
    })
}

/// What a process says to a hub that does this.
fn process_against(hub: impl FnOnce(TcpStream) + Send) -> io::Error {
    let (here, there) = ends();
    thread::scope(|s| {
        s.spawn(move || hub(there));
        let error = introduce(&here, b"x", 1, 2, Instant::now() + GREETING).unwrap_err();
        drop(here);
        error
    })
}

#[track_caller]
fn says(text: &str, expected: &str) {
    assert!(text.contains(expected), "`{text}` does not say `{expected}`");
}

fn hello(mut stream: &TcpStream, version: u16) -> (Nonce, Answer) {
    let nonce = random().unwrap();
    wire::write(&mut stream, &Hello { magic: MAGIC, version, nonce }).unwrap();
    (nonce, wire::read(&mut stream, MOST).unwrap())
}

#[test]
fn both_refuse_another_version() {
    let other = VERSION + 1;
    let why = hub_against(|stream| {
        // The answer names the hub's version, so that this side can say both.
        assert_eq!(hello(&stream, other).1.version, VERSION);
    });
    says(&why, &format!("version {other} of the protocol, rank 0 version {VERSION}"));
    let why = process_against(|mut stream| {
        let _: Hello = wire::read(&mut stream, MOST).unwrap();
        let (nonce, proof) = (random().unwrap(), [0; 32]);
        wire::write(&mut stream, &Answer { magic: MAGIC, version: other, nonce, proof }).unwrap();
        let claim: Claim = wire::read(&mut stream, MOST).unwrap();
        assert_eq!((claim.host, claim.proof), (1, [0; 32]), "nothing is proved to who does not know the secret");
    });
    says(&why.to_string(), &format!("rank 0 speaks version {other} of the protocol, rank 1 version {VERSION}"));
}

/// The others wait for a process that proves it is of this cluster, also if it cannot take part; not for strangers.
#[test]
fn who_is_missed_and_who_is_a_stranger() {
    let against = |version: u16, claims: bool| {
        let (here, there) = ends();
        thread::scope(|s| {
            s.spawn(move || {
                let (nonce, answer) = hello(&here, version);
                let proof = proof(mac(b"x", b"host", [&nonce, &answer.nonce], [1, 2]));
                if claims {
                    wire::write(&mut &here, &Claim { host: 1, size: 2, proof }).unwrap();
                }
            });
            let text = |error: io::Error| Not::Stranger(error.to_string());
            greet(&there, GREETING, b"x", |_, _, welcome| welcome().map_err(text)).map(drop)
        })
    };
    let versions = format!("version {} of the protocol, rank 0 version {VERSION}", VERSION - 1);
    assert!(matches!(against(VERSION - 1, true), Err(Not::Member(why)) if why.contains(&versions)));
    assert!(matches!(against(VERSION - 1, false), Err(Not::Stranger(why)) if why.contains(&versions)));
    assert!(matches!(against(VERSION, false), Err(Not::Stranger(_))));
}

#[test]
fn both_refuse_another_secret() {
    let why = hub_against(|stream| {
        let error = introduce(&stream, b"y", 1, 2, Instant::now() + GREETING).unwrap_err().to_string();
        says(&error, "does not know this process's secret (GPU_POOL_SECRET)");
    });
    says(&why, "GPU_POOL_SECRET");
    // A process that does not look at the hub's proof learns no more.
    let proves =
        |secret: &[u8], nonce, answer: &Answer, claim| proof(mac(secret, b"host", [&nonce, &answer.nonce], claim));
    let other_nonce = |answer: Answer| Answer { nonce: [7; 32], ..answer };
    let wrong: [&(dyn Fn(Nonce, Answer) -> Proof + Sync); 4] = [
        &|nonce, answer| proves(b"y", nonce, &answer, [1, 2]),
        // The hub's own proof, sent back.
        &|_, answer| answer.proof,
        // The proof of another claim, and of another connection.
        &|nonce, answer| proves(b"x", nonce, &answer, [0, 2]),
        &|nonce, answer| proves(b"x", nonce, &other_nonce(answer), [1, 2]),
    ];
    for wrong in wrong {
        let why = hub_against(|mut stream| {
            let (nonce, answer) = hello(&stream, VERSION);
            wire::write(&mut stream, &Claim { host: 1, size: 2, proof: wrong(nonce, answer) }).unwrap();
            let verdict: Verdict = wire::read(&mut stream, MOST).unwrap();
            assert!(matches!(verdict, Verdict::Refused(why) if why.contains("the secrets differ")));
        });
        says(&why, "the secrets differ");
    }
}

#[test]
fn what_is_no_hub_is_named() {
    let web = &b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"[..];
    let ssh = b"SSH-2.0-OpenSSH_9.6\r\n";
    for garbage in [web, ssh, &[0; 64], &[255; 64], b""] {
        let why = process_against(|mut stream| {
            let _: Hello = wire::read(&mut stream, MOST).unwrap();
            stream.write_all(garbage).unwrap();
        });
        assert!(matches!(why.kind(), ErrorKind::InvalidData | ErrorKind::UnexpectedEof), "{why}");
    }
    let why = process_against(|mut stream| {
        let _: Hello = wire::read(&mut stream, MOST).unwrap();
        let answer = Answer { magic: *b"gpu-poll", version: VERSION, nonce: [0; 32], proof: [0; 32] };
        wire::write(&mut stream, &answer).unwrap();
    });
    says(&why.to_string(), "speaks something else");
}

/// Half-open: who sends a byte now and then has no longer than the greeting.
#[test]
fn a_slow_peer_has_no_more_time_than_a_silent_one() {
    for drips in [false, true] {
        let (mut here, there) = ends();
        thread::scope(|s| {
            s.spawn(move || {
                // The other end is closed in the end, which ends this.
                while drips && here.write_all(&[0]).is_ok() {
                    thread::sleep(Duration::from_millis(1));
                }
                let _ = here.read(&mut [0; 1]);
            });
            let read = Until(&there, Instant::now() + Duration::from_millis(50)).read_exact(&mut [0; 1 << 16]);
            let kind = read.unwrap_err().kind();
            assert!(matches!(kind, ErrorKind::TimedOut | ErrorKind::WouldBlock), "{kind:?}");
            drop(there);
        });
    }
}
